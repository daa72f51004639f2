"""Recognition, safe reading, loading and conversion of other implementations' weights.

The origin of a file is the implementation that wrote it. One module per origin (`torchvision`,
`detectron2`, `maskrcnn_benchmark`, `caffe2`) defines three things: how its files are recognised,
how its tensor names and layouts map to those of this model, and which settings its files imply.
"""
