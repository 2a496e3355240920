# python train.py config/gpt2_124m.py
# torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py
#
# GPT-2 with 124 million parameters, trained from scratch on OpenWebText (prepare/openwebtext.py, 9.0 billion tokens),
# or on 10 billion tokens of FineWeb-Edu (prepare/fineweb.py) with --dataset=fineweb. Not run to its end.
#
# The batch size (512 sequences x 1,024 tokens = 0.52 million tokens per step) and the learning rate are those of the
# GPT-3 model of this size (Brown et al. 2020, table 2.1). 19,072 steps are 10.0 billion tokens, 80 per parameter.
# One H100 trained 529,000 tokens per second, with 32 sequences at a time and smaller chunks of the loss than today's
# (2026-11-26): 5.3 hours.
# According to nanoGPT's README, OpenAI's gpt2 has a loss of 3.12 on nanoGPT's split of this text, and nanoGPT's own run
# reached 2.85 after 295 billion tokens.
out_dir = "out-gpt2-124m"
dataset = "openwebtext"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024

batch_size = 16  # choose what fits in memory; total_batch_tokens stays the same
total_batch_tokens = 512 * block_size
max_iters = 19072
learning_rate = 0.0006
min_lr = learning_rate / 10
warmup_iters = 700  # 367 million tokens; GPT-3 warms up for 375 million

eval_interval = 500
eval_iters = 1024 // batch_size  # 1 million of the 4.4 million validation tokens
