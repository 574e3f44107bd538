//! The numbers that Prometheus reads. Each has its unit in its name; what they mean is said to Prometheus too.
//!
//! Counters and histograms are written where things happen (here through `Numbers`, in the volume and the
//! mounts through the same recorder); gauges are set when somebody asks.

use std::sync::OnceLock;

use headrace_base::{Error, Result};
use metrics::{
    Counter, Histogram, Unit, counter, describe_counter, describe_gauge, describe_histogram, histogram,
};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

/// A batch from memory takes about a millisecond, one of cold large files seconds.
const SECONDS_BUCKETS: [f64; 13] =
    [0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0];

static RECORDER: OnceLock<PrometheusHandle> = OnceLock::new();

/// Before anything registers a counter. One process has one recorder, however many engines it runs.
pub fn install() -> Result<PrometheusHandle> {
    if let Some(handle) = RECORDER.get() {
        return Ok(handle.clone());
    }
    let recorder = PrometheusBuilder::new()
        .set_buckets(&SECONDS_BUCKETS)
        .map_err(|cause| Error::internal("set up metrics").with_cause(cause))?
        .build_recorder();
    let handle = RECORDER.get_or_init(|| recorder.handle()).clone();
    if metrics::set_global_recorder(recorder).is_err() {
        tracing::debug!("another engine of this process has the recorder");
    }
    describe();
    Ok(handle)
}

fn describe() {
    describe_counter!("headrace_requests_total", "Requests on the local socket, by op.");
    describe_counter!("headrace_errors_total", "Requests that were answered with an error, by kind.");
    describe_counter!("headrace_read_bytes_total", Unit::Bytes, "File bytes read through all doors.");
    describe_counter!("headrace_written_bytes_total", Unit::Bytes, "File bytes written through all doors.");
    describe_counter!("headrace_loader_batches_total", "Batches sent to loaders.");
    describe_counter!("headrace_loader_samples_total", "Samples in these batches.");
    describe_counter!("headrace_loader_bytes_total", Unit::Bytes, "Bytes of these samples.");
    describe_histogram!("headrace_gather_seconds", Unit::Seconds, "Gathering one batch.");
    describe_histogram!(
        "headrace_slot_wait_seconds",
        Unit::Seconds,
        "A stream could not gather its next batch for want of memory: waiting for a batch to be released."
    );
    describe_gauge!("headrace_buffers_bytes", Unit::Bytes, "Batches and messages in memory.");
    describe_gauge!("headrace_buffers_bytes_max", Unit::Bytes, "The most these may be.");
    describe_gauge!("headrace_dirty_bytes", Unit::Bytes, "Written, and not yet in a segment.");
    describe_gauge!("headrace_resident_bytes", Unit::Bytes, "Memory of the engine's process.");
    describe_gauge!("headrace_clients", "Open connections on the local socket.");
    describe_gauge!("headrace_streams", "Loaders being served.");
    describe_gauge!("headrace_mounts", "Mounts being served.");
    describe_gauge!("headrace_mount_requests", "Requests that the mounts of now have answered.");
    describe_counter!(
        "headrace_object_requests_total",
        "Requests to the object store, without their repetitions."
    );
    describe_counter!("headrace_object_bytes_total", Unit::Bytes, "Bytes to and from the object store.");
    describe_counter!("headrace_object_upload_failures_total", "Uploads that failed; each is tried again.");
    describe_counter!("headrace_flash_evicted_bytes_total", Unit::Bytes, "Bytes evicted from flash.");
    describe_counter!("headrace_flash_repaired_total", "Damaged copies on flash that were fetched again.");
    describe_gauge!("headrace_object_dirty_bytes", Unit::Bytes, "On flash, and not in the object tier yet.");
    describe_gauge!(
        "headrace_object_dirty_seconds",
        Unit::Seconds,
        "How long the oldest of these has waited."
    );
    describe_gauge!("headrace_object_failing", "1 while uploads fail.");
    describe_gauge!("headrace_flash_clean_bytes", Unit::Bytes, "On flash and in the object tier.");
    describe_gauge!("headrace_flash_bytes_max", Unit::Bytes, "The most that the flash tier may be.");
    describe_gauge!(
        "headrace_backup_timestamp_seconds",
        Unit::Seconds,
        "When the last complete backup was begun."
    );
}

/// Handles of the numbers that are written often: finding one by name costs more than counting.
#[derive(Debug)]
pub struct Numbers {
    pub loader_batches: Counter,
    pub loader_samples: Counter,
    pub loader_bytes: Counter,
    pub gather_seconds: Histogram,
    pub slot_wait_seconds: Histogram,
}

impl Numbers {
    pub fn new() -> Numbers {
        Numbers {
            loader_batches: counter!("headrace_loader_batches_total"),
            loader_samples: counter!("headrace_loader_samples_total"),
            loader_bytes: counter!("headrace_loader_bytes_total"),
            gather_seconds: histogram!("headrace_gather_seconds"),
            slot_wait_seconds: histogram!("headrace_slot_wait_seconds"),
        }
    }
}

/// Bytes of memory that this process has, from /proc/self/statm (its second number, in pages).
pub fn resident_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| text.split_whitespace().nth(1)?.parse::<u64>().ok());
    // SAFETY: sysconf only reads a number that never changes.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    pages.unwrap_or(0) * u64::try_from(page_bytes).unwrap_or(4096)
}
