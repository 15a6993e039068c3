"""One file per backbone: what turns signals into features z and logits (`base.Backbone`)."""
