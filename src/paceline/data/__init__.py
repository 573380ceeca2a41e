"""What comes when and from where: the order of samples, tokenised corpora, users' files."""
