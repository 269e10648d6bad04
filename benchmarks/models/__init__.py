"""Do our GPT-2 and BERT give what transformers' give, from the same weights?"""
