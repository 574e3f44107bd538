//! The native driver of headrace bench: file workloads timed without an interpreter
