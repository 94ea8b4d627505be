"""Layers that compute in bfloat16 on a CPU without autocast's copies.

Autocast casts every weight for every micro-batch and every input once for each layer that reads it.
Here a weight has one bfloat16 copy, made anew after an update, norms write what the next product
reads, and layers that read the same input share one product. The residual stream, norms, softmax
and all gradients of weights stay float32.
"""
