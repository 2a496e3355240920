# python train.py config/gpt2_124m.py
# torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py
#
# GPT-2 with 124 million parameters, from scratch on OpenWebText (prepare/openwebtext.py: 9.0 billion tokens); on
# FineWeb-Edu's 10 billion (prepare/fineweb.py) with --dataset=fineweb. Not run yet: no GPU has been at hand.
#
# A step is 512 sequences x 1,024 tokens = 0.52 million tokens, and with its learning rate that of a GPT-3 of this
# size (Brown et al. 2020, table 2.1). 19,072 steps are 10.0 billion tokens, 80 a parameter. At 0.85 GFLOP a token
# (python model.py) that is 8.5e+18 FLOP: 6 hours on one H100 at 40 % of its 989 TFLOP/s.
# gpt2 itself has 3.12 on nanoGPT's split of this text; nanoGPT's own run 2.85, after 295 billion tokens (its README).
out_dir = "out-gpt2-124m"
dataset = "openwebtext"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024

batch_size = 16  # as fits into memory; a step stays what it is
total_batch_tokens = 512 * block_size
max_iters = 19072
learning_rate = 0.0006
min_lr = learning_rate / 10
warmup_iters = 700  # 367 million tokens; GPT-3's rise is 375 million

eval_interval = 500
eval_iters = 1024 // batch_size  # a million of the 4.4 million validation tokens
