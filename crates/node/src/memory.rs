//! How the process gives memory back. Buffers come and go by the megabyte, on many threads; by its defaults the C
//! library keeps an arena for each of them and what was freed in it.

/// Threads share these; the hot paths allocate little.
const ARENAS_MAX: i32 = 4;
/// Allocations from this size on are mappings of their own, given back when they are freed. Setting it also keeps
/// the library from raising it by itself.
const MAPPED_BYTES_MIN: i32 = 256 * 1024;

/// Call it before the first thread starts.
pub fn keep_small() {
    // SAFETY: mallopt changes numbers inside the allocator, and no other thread runs yet.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, ARENAS_MAX);
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES_MIN);
    }
}
