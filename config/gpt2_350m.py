# python train.py config/gpt2_350m.py
# torchrun --standalone --nproc_per_node=8 train.py config/gpt2_350m.py
#
# GPT-2 with 354 million parameters, trained from scratch on OpenWebText (prepare/openwebtext.py, 9.0 billion tokens),
# or on 10 billion tokens of FineWeb-Edu (prepare/fineweb.py) with --dataset=fineweb. Not run yet.
#
# The batch size (512 sequences x 1,024 tokens = 0.52 million tokens per step) and the learning rate are those of the
# GPT-3 model of this size (Brown et al. 2020, table 2.1). 19,072 steps are 10.0 billion tokens, 28 per parameter.
# At 2.42 GFLOPs per token (python model.py) this is 2.4e+19 FLOPs: 17 hours on one H100 at 40% of its 989 TFLOP/s.
# According to nanoGPT's README, OpenAI's gpt2-medium has a loss of 2.84 on nanoGPT's split of this text.
out_dir = "out-gpt2-350m"
dataset = "openwebtext"

n_layer = 24
n_head = 16
n_embd = 1024
block_size = 1024

batch_size = 8  # choose what fits in memory; total_batch_tokens stays the same
total_batch_tokens = 512 * block_size
max_iters = 19072
learning_rate = 0.0003
min_lr = learning_rate / 10
warmup_iters = 700  # 367 million tokens; GPT-3 warms up for 375 million

eval_interval = 500
eval_iters = 1024 // batch_size  # 1 million of the 4.4 million validation tokens
