"""Programs to read and run, installed with the package: `python -m tierd_client.examples.train_gpt --help`.

Each file here is a symbolic link to the one source in examples/ of the source tree. A wheel holds its content.
"""
