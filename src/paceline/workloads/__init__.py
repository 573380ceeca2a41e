"""What can be trained or fitted: each folder holds all there is about one."""
