# python train.py config/gpt2_1558m.py
# torchrun --standalone --nproc_per_node=8 train.py config/gpt2_1558m.py
#
# GPT-2 with 1,557 million parameters, from scratch on OpenWebText (prepare/openwebtext.py: 9.0 billion tokens); on
# FineWeb-Edu's 10 billion (prepare/fineweb.py) with --dataset=fineweb. Not run yet: no GPU has been at hand.
#
# A step is 1,024 sequences x 1,024 tokens = 1.05 million tokens, and with its learning rate that of a GPT-3 of this
# size (Brown et al. 2020, table 2.1). 29,700 steps are 31.1 billion tokens, 20 a parameter. At 10.27 GFLOP a token
# (python model.py) that is 3.2e+20 FLOP: 9 days on one H100 at 40 % of its 989 TFLOP/s.
# gpt2-xl has 2.54 on nanoGPT's split of this text (its README).
out_dir = "out-gpt2-1558m"
dataset = "openwebtext"

n_layer = 48
n_head = 25
n_embd = 1600
block_size = 1024

batch_size = 2  # as fits into memory; a step stays what it is
total_batch_tokens = 1024 * block_size
max_iters = 29700
learning_rate = 0.0002
min_lr = learning_rate / 10
warmup_iters = 350  # 367 million tokens; GPT-3's rise is 375 million

eval_interval = 500
eval_iters = 1024 // batch_size  # a million of the 4.4 million validation tokens
