"""Fine-tuning on a data set folder, with a configuration that fits the data and the machine."""
