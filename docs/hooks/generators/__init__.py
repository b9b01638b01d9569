"""Makes the pages of the documentation site that come from the code, and checks that nothing public is left out."""
