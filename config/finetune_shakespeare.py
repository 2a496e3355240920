# python train.py config/finetune_shakespeare.py
#
# OpenAI's GPT-2 on Tiny Shakespeare in its own tokens (prepare/shakespeare.py), a few steps at a low, constant rate.
# Not run with OpenAI's weights yet, which need the hub. With random ones of the same shape, two cores of an AMD EPYC
# (Zen 5) take 56 s a step. gpt2-xl, which nanoGPT's file of this name takes, wants a GPU: --init_from=gpt2-xl
out_dir = "out-finetune-shakespeare"
init_from = "gpt2"
dataset = "shakespeare"

batch_size = 1
gradient_accumulation_steps = 32
max_iters = 20  # 20 * 32 * 1,024 tokens: twice through the text
learning_rate = 3e-5
decay_lr = False
dropout = 0.1

eval_interval = 5
log_interval = 1
