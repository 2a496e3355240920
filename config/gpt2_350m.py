# python train.py config/gpt2_350m.py
# torchrun --standalone --nproc_per_node=8 train.py config/gpt2_350m.py
#
# GPT-2 with 354 million parameters, from scratch on OpenWebText (prepare/openwebtext.py: 9.0 billion tokens); on
# FineWeb-Edu's 10 billion (prepare/fineweb.py) with --dataset=fineweb. Not run yet: no GPU has been at hand.
#
# A step is 512 sequences x 1,024 tokens = 0.52 million tokens, and with its learning rate that of a GPT-3 of this
# size (Brown et al. 2020, table 2.1). 19,072 steps are 10.0 billion tokens, 28 a parameter. At 2.42 GFLOP a token
# (python model.py) that is 2.4e+19 FLOP: 17 hours on one H100 at 40 % of its 989 TFLOP/s.
# gpt2-medium has 2.84 on nanoGPT's split of this text (its README).
out_dir = "out-gpt2-350m"
dataset = "openwebtext"

n_layer = 24
n_head = 16
n_embd = 1024
block_size = 1024

batch_size = 8  # as fits into memory; a step stays what it is
total_batch_tokens = 512 * block_size
max_iters = 19072
learning_rate = 0.0003
min_lr = learning_rate / 10
warmup_iters = 700  # 367 million tokens; GPT-3's rise is 375 million

eval_interval = 500
eval_iters = 1024 // batch_size  # a million of the 4.4 million validation tokens
