# python train.py config/tunes.py
#
# A GPT with 0.8 million parameters on the characters of 11,573 folk tunes in ABC notation. Measured on two cores of an
# AMD EPYC (Zen 5) shared with other programs: 5 min, validation loss 0.8251 nats per character.
# Not run on a GPU yet.
out_dir = "out-tunes"
dataset = "tunes"

n_layer = 4
n_head = 4
n_embd = 4 * 32
position = "relative"
block_size = 256  # one tune and a half
batch_size = 16
activation = "gelu"  # exact GELU, on a CPU four times as fast as GPT-2's approximation

max_iters = 2700  # 5 epochs
optimizer = "muon"
muon_learning_rate = 0.03
learning_rate = 8e-3
lr_schedule = "wsd"
warmup_iters = 0
wsd_decay_iters = 7 * max_iters // 10
min_lr = 0.0
beta2 = 0.99  # higher than the default, because a step has few tokens

eval_interval = max_iters // 9
snapshots = 30  # for tools/view.py
