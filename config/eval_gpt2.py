# python train.py config/eval_gpt2.py
#
# The validation loss of OpenAI's gpt2 (124 million parameters) on OpenWebText (prepare/openwebtext.py).
# nanoGPT's README reports 3.12 on its own split. Not run yet: weights and text are on the hub.
init_from = "gpt2"
dataset = "openwebtext"
eval_only = True
eval_iters = 500
batch_size = 8
