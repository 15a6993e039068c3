"""What a cardiologist would measure on an ECG, and trees that predict diagnoses from it.

With few labels such trees are better than a network, and they err elsewhere: the committee that ECGMatch starts from can ask
them (`--method.measurements`). `beats` finds the heart beats, `measure` turns a recording into a row of numbers, `trees`
predicts from it. `convolutions` is a third way to read an ECG, which can be asked beside the trees
(`--method.convolutions`). `opinion` weighs both against the networks.
"""
