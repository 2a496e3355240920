# python train.py config/nanogpt_char.py
#
# The recipe of nanoGPT's config/train_shakespeare_char.py, with 10.7 million parameters, for a GPU. On an H200, the
# best validation loss was 1.467, at step 1,750, after 41 s with --compile=True and a warm compiler cache. nanoGPT's
# README reports 1.4697 after about 3 minutes on an A100: the best of 20 evaluations on random batches. Folio evaluates
# on the whole validation set.
out_dir = "out-nanogpt-char"
dataset = "shakespeare_char"
sampling = "random"

n_layer = 6
n_head = 6
n_embd = 384
block_size = 256
dropout = 0.2
activation = "gelu"
batch_size = 64

max_iters = 5000
learning_rate = 1e-3
lr_schedule = "cosine"
warmup_iters = 100
min_lr = 1e-4
beta2 = 0.99
weight_decay = 0.1

eval_interval = 250
always_save_checkpoint = False  # the model overfits: evaluations save only if the validation loss improved
