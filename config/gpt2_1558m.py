# python train.py config/gpt2_1558m.py
# torchrun --standalone --nproc_per_node=8 train.py config/gpt2_1558m.py
#
# GPT-2 with 1,557 million parameters, trained from scratch on OpenWebText (prepare/openwebtext.py, 9.0 billion tokens),
# or on 10 billion tokens of FineWeb-Edu (prepare/fineweb.py) with --dataset=fineweb. Not run yet.
#
# The batch size (1,024 sequences x 1,024 tokens = 1.05 million tokens per step) and the learning rate are those of the
# GPT-3 model of this size (Brown et al. 2020, table 2.1). 29,700 steps are 31.1 billion tokens, 20 per parameter.
# At 10.27 GFLOPs per token (python model.py) this is 3.2e+20 FLOPs: 9 days on one H100 at 40% of its 989 TFLOP/s.
# According to nanoGPT's README, OpenAI's gpt2-xl has a loss of 2.54 on nanoGPT's split of this text.
out_dir = "out-gpt2-1558m"
dataset = "openwebtext"

n_layer = 48
n_head = 25
n_embd = 1600
block_size = 1024

batch_size = 2  # choose what fits in memory; total_batch_tokens stays the same
total_batch_tokens = 1024 * block_size
max_iters = 29700
learning_rate = 0.0002
min_lr = learning_rate / 10
warmup_iters = 350  # 367 million tokens; GPT-3 warms up for 375 million

eval_interval = 500
eval_iters = 1024 // batch_size  # 1 million of the 4.4 million validation tokens
