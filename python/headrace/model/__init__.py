"""What is talked about: messages, attributes, manifests, batches. No I/O except memory maps handed in."""
