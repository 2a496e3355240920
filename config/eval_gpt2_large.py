# python train.py config/eval_gpt2_large.py
#
# The validation loss of OpenAI's gpt2-large (774 million parameters) on OpenWebText, which prepare/openwebtext.py makes.
# nanoGPT's README reports 2.67 on its own split of it. Not run yet: its weights and the text need the hub.
init_from = "gpt2-large"
dataset = "openwebtext"
eval_only = True
eval_iters = 500
batch_size = 8
