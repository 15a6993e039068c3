"""What a cardiologist would measure on an ECG, and trees that predict diagnoses from it.

With few labels such trees are better than a network, and they err elsewhere: the committee that ECGMatch starts from can ask
them (`--method.measurements`). `beats` finds the heart beats, `measure` turns a recording into a row of numbers, `trees`
predicts from it, `opinion` weighs the trees against the networks.
"""
