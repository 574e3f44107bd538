//! Shared memory that batches are gathered into, and who has which piece of it.
//!
//! ```text
//! free --acquire--> filling --give--> with the client --release--> free
//!                      \--(the stream ends)--> dropped when the last gatherer lets go
//! ```
//! Each slot is its own memfd and mapping. The client cannot shorten it (sealed), so filling it cannot fault;
//! its pages exist before it is used, so that memory that is not there is an error here and not a signal.
//! A slot that is with the client is never written. A free one that is too small is given new memory under its
//! old number: the client, who gets the new descriptor, lets go of the old map.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use headrace_base::{Budget, Error, Reservation, Result};
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
};

const PAGE: u64 = 4096;

#[derive(Debug)]
pub struct SlotMemory {
    map: MmapRaw,
    file: File,
    bytes: u64,
    _reservation: Reservation,
}

impl SlotMemory {
    /// As large as its reservation, which is a multiple of the page size.
    pub fn new(reservation: Reservation) -> Result<SlotMemory> {
        let bytes = reservation.bytes();
        let doing = |step: &'static str| {
            move |cause: rustix::io::Errno| {
                Error::io(
                    format_args!("make shared memory of {bytes} bytes for a batch ({step})"),
                    cause.into(),
                )
            }
        };
        let fd = memfd_create("headrace-batch", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(doing("memfd_create"))?;
        ftruncate(&fd, bytes).map_err(doing("ftruncate"))?;
        fallocate(&fd, FallocateFlags::empty(), 0, bytes).map_err(doing("fallocate"))?;
        let file = File::from(fd);
        let length =
            usize::try_from(bytes).map_err(|_| Error::invalid("a batch beyond the address space"))?;
        let map = MmapOptions::new().len(length).populate().map_raw(&file).map_err(|cause| {
            Error::io(format_args!("map {bytes} bytes of shared memory for a batch"), cause)
        })?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(doing("seal"))?;
        Ok(SlotMemory { map, file, bytes, _reservation: reservation })
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The bytes [start, start + length).
    ///
    /// # Panics
    /// If they are not all inside.
    ///
    /// # Safety
    /// For as long as the slice lives no other slice over any of these bytes may exist in this process.
    #[allow(clippy::mut_from_ref, reason = "the memory is shared and raw; the caller keeps the parts apart")]
    pub unsafe fn part(&self, start: u64, length: u64) -> &mut [u8] {
        assert!(
            start.checked_add(length).is_some_and(|end| end <= self.bytes),
            "bytes {start} + {length} of {} are inside",
            self.bytes
        );
        // SAFETY: the range lies in the mapping, which lives as long as self and cannot be shortened (sealed);
        // no other slice of this process covers it (the caller's promise). The client's process may write it:
        // then it spoils its own batch; plain bytes have no value that is invalid.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(start as usize), length as usize) }
    }
}

// SAFETY: the mapping is plain shared memory; all access goes through `part`, whose callers keep apart.
unsafe impl Send for SlotMemory {}
// SAFETY: as above.
unsafe impl Sync for SlotMemory {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Filling,
    WithClient,
}

#[derive(Debug)]
struct Slot {
    memory: Arc<SlotMemory>,
    state: State,
    /// Whether the client has been sent this memory's descriptor.
    announced: bool,
}

#[derive(Debug, Default)]
pub struct SlotTable {
    slots: Vec<Option<Slot>>,
}

impl SlotTable {
    /// A slot of at least `bytes`: a free one, else a new one if the budget has room and this table then holds
    /// at most `bytes_max`. None: neither is to be had now.
    pub fn acquire(&mut self, bytes: u64, budget: &Arc<Budget>, bytes_max: u64) -> Result<Option<u32>> {
        let free = |slot: &&Slot| slot.state == State::Free;
        let fitting = (0..self.slots.len())
            .filter(|number| {
                self.slots[*number].as_ref().filter(free).is_some_and(|slot| slot.memory.bytes >= bytes)
            })
            .min_by_key(|number| self.slots[*number].as_ref().map(|slot| slot.memory.bytes));
        if let Some(number) = fitting {
            if let Some(slot) = &mut self.slots[number] {
                slot.state = State::Filling;
            }
            return Ok(Some(number as u32));
        }
        // Those that are free are too small for what is needed now: their bytes may be what is missing.
        let number = self
            .slots
            .iter()
            .position(|slot| slot.as_ref().is_none_or(|slot| slot.state == State::Free))
            .unwrap_or(self.slots.len());
        if let Some(slot) = self.slots.get_mut(number) {
            *slot = None;
        }
        let wanted = slot_bytes(bytes);
        if self.bytes() + wanted > bytes_max {
            return Ok(None);
        }
        // Rounded up if there is room, else just what is needed.
        let least = bytes.next_multiple_of(PAGE).max(PAGE);
        let Some(reservation) = budget.try_reserve(wanted).or_else(|| budget.try_reserve(least)) else {
            return Ok(None);
        };
        let memory = Arc::new(SlotMemory::new(reservation)?);
        let slot = Some(Slot { memory, state: State::Filling, announced: false });
        match self.slots.get_mut(number) {
            Some(place) => *place = slot,
            None => self.slots.push(slot),
        }
        Ok(Some(number as u32))
    }

    pub fn memory(&self, number: u32) -> Option<&Arc<SlotMemory>> {
        self.slot(number).map(|slot| &slot.memory)
    }

    /// The slot goes to the client. True if its descriptor has to go along.
    pub fn give(&mut self, number: u32) -> bool {
        let Some(slot) = self.slots.get_mut(number as usize).and_then(Option::as_mut) else { return false };
        slot.state = State::WithClient;
        !std::mem::replace(&mut slot.announced, true)
    }

    /// Invalid if the client does not have it.
    pub fn release(&mut self, number: u32) -> Result<()> {
        match self.slots.get_mut(number as usize).and_then(Option::as_mut) {
            Some(slot) if slot.state == State::WithClient => {
                slot.state = State::Free;
                Ok(())
            }
            _ => Err(Error::invalid(format!("slot {number} was released, but is not with the client"))),
        }
    }

    /// Lets go of what is not with the client: nothing will be gathered any more.
    pub fn drop_unused(&mut self) {
        for slot in &mut self.slots {
            slot.take_if(|slot| slot.state != State::WithClient);
        }
    }

    pub fn bytes(&self) -> u64 {
        self.slots.iter().flatten().map(|slot| slot.memory.bytes).sum()
    }

    /// Slots with the client, and their bytes.
    pub fn with_client(&self) -> (u64, u64) {
        let with = self.slots.iter().flatten().filter(|slot| slot.state == State::WithClient);
        with.fold((0, 0), |(count, bytes), slot| (count + 1, bytes + slot.memory.bytes))
    }

    /// Slots there are, in whatever state.
    pub fn count(&self) -> u64 {
        self.slots.iter().flatten().count() as u64
    }

    fn slot(&self, number: u32) -> Option<&Slot> {
        self.slots.get(number as usize).and_then(Option::as_ref)
    }
}

/// Batches of one data set differ in size: rounding up by at most a sixteenth lets one slot serve most of them.
fn slot_bytes(bytes: u64) -> u64 {
    let step = (bytes.next_power_of_two() / 32).max(PAGE);
    bytes.next_multiple_of(step).max(PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_kept_slot_is_never_given_out_again() {
        let budget = Budget::new("test", 100 * MIB);
        let mut table = SlotTable::default();
        let first = table.acquire(MIB, &budget, u64::MAX).unwrap().unwrap();
        assert!(table.give(first), "its descriptor goes along");
        let second = table.acquire(MIB, &budget, u64::MAX).unwrap().unwrap();
        assert_ne!(first, second);
        assert!(table.give(second));
        table.release(first).unwrap();
        assert_eq!(table.acquire(MIB, &budget, u64::MAX).unwrap(), Some(first));
        assert!(!table.give(first), "the client has it mapped");
        assert_eq!(table.with_client().0, 2);
    }

    #[test]
    fn wrong_releases_are_refused() {
        let budget = Budget::new("test", 100 * MIB);
        let mut table = SlotTable::default();
        assert!(table.release(0).is_err());
        let slot = table.acquire(1, &budget, u64::MAX).unwrap().unwrap();
        assert!(table.release(slot).is_err(), "it is being filled");
        table.give(slot);
        table.release(slot).unwrap();
        assert!(table.release(slot).is_err(), "it was released already");
        assert!(table.release(u32::MAX).is_err());
    }

    #[test]
    fn the_budget_holds_and_is_given_back() {
        let budget = Budget::new("test", 3 * MIB);
        let mut table = SlotTable::default();
        for _ in 0..3 {
            let slot = table.acquire(MIB, &budget, u64::MAX).unwrap().unwrap();
            table.give(slot);
        }
        assert_eq!(table.acquire(MIB, &budget, u64::MAX).unwrap(), None);
        assert_eq!((budget.used(), table.with_client()), (3 * MIB, (3, 3 * MIB)));
        let held = Arc::clone(table.memory(1).unwrap());
        drop(table);
        assert_eq!(budget.used(), MIB, "a gatherer still writes into one");
        drop(held);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_free_slot_that_is_too_small_makes_room_under_its_number() {
        let budget = Budget::new("test", 3 * MIB);
        let mut table = SlotTable::default();
        let slot = table.acquire(MIB, &budget, u64::MAX).unwrap().unwrap();
        table.give(slot);
        table.release(slot).unwrap();
        assert_eq!(table.acquire(5 * MIB / 2, &budget, u64::MAX).unwrap(), Some(slot));
        assert!(table.give(slot), "its new descriptor goes along");
        assert!(table.memory(slot).unwrap().bytes() >= 5 * MIB / 2);
        assert_eq!(table.acquire(4096, &budget, 2 * MIB).unwrap(), None, "the table's own limit");
    }

    #[test]
    fn the_client_cannot_shorten_a_slot() {
        let budget = Budget::new("test", MIB);
        let memory = SlotMemory::new(budget.try_reserve(8192).unwrap()).unwrap();
        assert!(ftruncate(memory.fd(), 0).is_err());
        assert!(ftruncate(memory.fd(), 16384).is_err());
        // SAFETY: the only slice there is.
        unsafe { memory.part(8000, 192) }.fill(7);
        let mut read = [0; 8192];
        assert_eq!(rustix::io::pread(memory.fd(), &mut read, 0).unwrap(), 8192);
        assert_eq!((read[7999], read[8000], read[8191]), (0, 7, 7));
    }

    #[test]
    fn slots_are_rounded_up_by_little() {
        for bytes in [1, 4096, 4097, 2_629_632, 64 * MIB + 1] {
            let rounded = slot_bytes(bytes);
            assert!(rounded >= bytes && rounded.is_multiple_of(4096));
            assert!(rounded - bytes <= (bytes / 16).max(4096), "{bytes}: {rounded}");
        }
    }
}
