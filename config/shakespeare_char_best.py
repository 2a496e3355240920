# python train.py config/shakespeare_char_best.py
#
# A character-level GPT with 4.8 million parameters and dropout on Tiny Shakespeare, for the lowest loss.
# Measured on two cores of an AMD EPYC (Zen 5): 16 min, validation loss 1.406 (1.404 with --seed=11).
# Not run on a GPU yet.
out_dir = "out-shakespeare-char-best"
dataset = "shakespeare_char"

n_layer = 6
n_head = 8
n_embd = 8 * 32
block_size = 256
batch_size = 16
dropout = 0.1
activation = "gelu"

max_iters = 2400  # 9.8 epochs
optimizer = "muon"
muon_learning_rate = 0.03
learning_rate = 8e-3
lr_schedule = "wsd"
warmup_iters = 0
wsd_decay_iters = 7 * max_iters // 10
min_lr = 0.0
beta2 = 0.99

eval_interval = max_iters // 4
always_save_checkpoint = False  # evaluations save only if the validation loss improved
