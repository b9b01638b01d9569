"""Data loaders and samplers that resume at the batch after the last one that was trained on."""
