"""What a cardiologist would measure on an ECG, and trees that predict diagnoses from it.

With few labels such trees are better than a network, and they err elsewhere: the committee that ECGMatch starts from can ask
them (`--method.measurements`). `beats` finds the heart beats, `rhythm` and `waves` measure them, `measure` makes one row of
numbers out of them, `trees` predicts from it, `trees_file` brings the trees of others, `opinion` weighs the trees against the
networks.
"""
