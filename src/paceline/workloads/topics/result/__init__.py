"""What a fit found: topics and mixtures, their file, their quality, new documents."""
