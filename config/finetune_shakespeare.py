# python train.py config/finetune_shakespeare.py
#
# Finetunes OpenAI's GPT-2 on Tiny Shakespeare in GPT-2 tokens (prepare/shakespeare.py), for a few steps at a low,
# constant learning rate. Not run with OpenAI's weights yet, because the Hugging Face hub could not be reached. With
# random weights of the same shape, a step takes 56 s on two cores of an AMD EPYC (Zen 5).
# nanoGPT's file of this name uses gpt2-xl, which needs a GPU: --init_from=gpt2-xl
out_dir = "out-finetune-shakespeare"
init_from = "gpt2"
dataset = "shakespeare"

batch_size = 1
gradient_accumulation_steps = 32
max_iters = 20  # 20 * 32 * 1,024 tokens, two epochs
learning_rate = 3e-5
decay_lr = False
dropout = 0.1

eval_interval = 5
log_interval = 1
