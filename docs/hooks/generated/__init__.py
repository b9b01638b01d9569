"""The pages of the documentation site that are made from the code, and the checks that nothing public is left out."""
