"""What the comparisons with other engines are made of: random models of real shapes, and each engine in its process."""
