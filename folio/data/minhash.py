"""The sizes of MinHash signatures and of the search for near duplicates, in Python and in compiled code."""

SIMILARITY = 0.5  # of near duplicates, at least; 0.5 is that of two texts of which about 8 % of the words differ
PERMUTATIONS = 128  # the standard error of an estimated similarity is at most 0.044
BANDS = 32  # of 4 values each: documents with a similarity of 0.5 have an equal band with a probability of 87 %
LONGEST_CHAIN = 100  # documents per band to compare with, the newest ones; 1,000 take 3 ms if all have a band in common
