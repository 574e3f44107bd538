//! One engine: local socket, batch ring, REST and metrics
