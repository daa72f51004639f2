"""Recognition, safe reading, loading and conversion of other implementations' weights.

One module per origin (`torchvision`, `detectron2`, `maskrcnn_benchmark`, `caffe2`) defines how to
recognise its files and to map tensor names and layouts to ours, and the settings it implies.
"""
