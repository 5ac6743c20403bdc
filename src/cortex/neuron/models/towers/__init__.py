"""Vision towers: from the pixels of pictures to vectors that take the place of embeddings in a decoder's prompt."""
