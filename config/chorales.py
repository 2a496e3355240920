# python train.py config/chorales.py
#
# A GPT with 0.8 million parameters on the events of Bach's chorales, in twelve keys, with relative positions as in the
# Music Transformer. Measured on two cores of an AMD EPYC (Zen 5) shared with other programs: 6 min 38 s, validation
# loss 0.7201 nats per event. Not run on a GPU yet.
out_dir = "out-chorales"
dataset = "chorales"

n_layer = 4
n_head = 4
n_embd = 4 * 32
position = "relative"  # distances between notes matter more than positions in the piece
block_size = 256  # about half a chorale
batch_size = 16
dropout = 0.1
activation = "gelu"  # exact GELU, on a CPU four times as fast as GPT-2's approximation

max_iters = 2600  # 5 epochs of each chorale in 12 keys
optimizer = "muon"
muon_learning_rate = 0.03
learning_rate = 8e-3
lr_schedule = "wsd"
warmup_iters = 0
wsd_decay_iters = 7 * max_iters // 10
min_lr = 0.0
beta2 = 0.99  # higher than the default, because a step has few tokens

eval_interval = max_iters // 10
snapshots = 30  # for tools/view.py
