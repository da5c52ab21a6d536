"""The device mesh: axes and sizes, the machines it is made of, and how processes join it."""
