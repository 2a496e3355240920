# python train.py config/summarize.py
#
# Summarizes docstrings by their first lines (prepare/summaries.py), with 1.05 million parameters.
# Measured on two cores of an AMD EPYC (Zen 5): 4 min 28 s, validation loss 4.03 nats per token (of the summaries),
# ROUGE-1 0.132. Pretrained on the documents and then finetuned, the model reaches 3.00 and 0.173 in the same number of
# steps: docs/use/tasks.md has the commands.
out_dir = "out-summarize"
dataset = "summaries"

n_layer = 4
n_head = 4
n_embd = 4 * 32
block_size = 512  # the longest pair has 399 tokens
position = "rotary"
batch_size = 8
activation = "gelu"  # exact GELU, on a CPU four times as fast as GPT-2's approximation

max_iters = 2000
optimizer = "muon"
muon_learning_rate = 0.03
learning_rate = 8e-3
lr_schedule = "wsd"
warmup_iters = 0
wsd_decay_iters = 7 * max_iters // 10
min_lr = 0.0
beta2 = 0.99  # higher than the default, because a step has few tokens

eval_interval = max_iters // 10
snapshots = 30  # for tools/view.py
