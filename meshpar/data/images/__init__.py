"""Pictures with a class each: read from folders and shards, decoded, cropped and mixed where rows are read."""
