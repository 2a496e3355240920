# python train.py config/eval_gpt2_large.py
#
# The validation loss of OpenAI's gpt2-large (774 million parameters) on OpenWebText (prepare/openwebtext.py).
# nanoGPT's README reports 2.67 on its own split. Not run yet: weights and text are on the hub.
init_from = "gpt2-large"
dataset = "openwebtext"
eval_only = True
eval_iters = 500
batch_size = 8
