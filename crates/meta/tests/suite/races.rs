//! File-system operations of two and three actors, in all interleavings of their steps: look, then commit; a
//! commit that conflicts looks again. Each outcome (what every actor was told, and the tree) must be one that
//! some order of whole operations gives, and the tree must hold together.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use headrace_base::Ino;
use headrace_format::key;
use headrace_meta::{At, Commit, CommitError, Durability, MetaStore, Precondition, Write};

use super::{World, delete, put, write};

/// Numbers are relative to the base of a run.
#[derive(Clone, Copy, Debug)]
enum Operation {
    Create { parent: u64, name: &'static str, ino: u64 },
    Mkdir { parent: u64, name: &'static str, ino: u64 },
    Rmdir { parent: u64, name: &'static str },
    Link { ino: u64, parent: u64, name: &'static str },
    Unlink { parent: u64, name: &'static str },
    Rename { from: (u64, &'static str), to: (u64, &'static str) },
}

use Operation::{Create, Link, Mkdir, Rename, Rmdir, Unlink};

type Told = Result<(), &'static str>;

enum Looked {
    Done(Told),
    Commit(Commit),
}

struct Actor {
    store: Arc<dyn MetaStore>,
    base: u64,
    operation: Operation,
    next: Option<Commit>,
    told: Option<Told>,
    conflicts: u32,
}

fn number(value: &[u8]) -> u64 {
    u64::from_be_bytes(value.try_into().unwrap())
}

impl Actor {
    fn get(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.store.get(key, At::Latest).unwrap()
    }

    fn ino(&self, ino: u64) -> Ino {
        Ino(self.base + ino)
    }

    fn step(&mut self) {
        match self.next.take() {
            None => match self.look() {
                Looked::Done(told) => self.told = Some(told),
                Looked::Commit(commit) => self.next = Some(commit),
            },
            Some(commit) => match self.store.commit(commit, Durability::Relaxed) {
                Ok(_) => self.told = Some(Ok(())),
                Err(CommitError::Conflict(_)) => self.conflicts += 1,
                Err(CommitError::Failed(error)) => panic!("{error:?}"),
            },
        }
    }

    fn look(&self) -> Looked {
        match self.operation {
            Create { parent, name, ino } => self.look_make(parent, name, ino, false),
            Mkdir { parent, name, ino } => self.look_make(parent, name, ino, true),
            Rmdir { parent, name } => {
                let entry = key::dentry(self.ino(parent), name.as_bytes());
                let Some(value) = self.get(&entry) else { return Looked::Done(Err("ENOENT")) };
                let ino = Ino(number(&value));
                let names = key::dentries(ino);
                if !self.store.scan(&names, &key::end_of(&names), 1, At::Latest).unwrap().is_empty() {
                    return Looked::Done(Err("ENOTEMPTY"));
                }
                Looked::Commit(Commit {
                    preconditions: vec![
                        Precondition::Equals(entry.clone(), value),
                        Precondition::Empty { prefix: names, guard: key::alive(ino) },
                    ],
                    writes: vec![delete(&entry), delete(&key::inode(ino)), delete(&key::alive(ino))],
                })
            }
            Link { ino, parent, name } => {
                let inode = key::inode(self.ino(ino));
                let entry = key::dentry(self.ino(parent), name.as_bytes());
                let guard = key::alive(self.ino(parent));
                let Some(links) = self.get(&inode) else { return Looked::Done(Err("ENOENT")) };
                if self.get(&guard).is_none() {
                    return Looked::Done(Err("ENOENT"));
                }
                if self.get(&entry).is_some() {
                    return Looked::Done(Err("EEXIST"));
                }
                Looked::Commit(Commit {
                    preconditions: vec![
                        Precondition::Present(guard),
                        Precondition::Absent(entry.clone()),
                        Precondition::Equals(inode.clone(), links.clone()),
                    ],
                    writes: vec![
                        put(&entry, &self.ino(ino).0.to_be_bytes()),
                        put(&inode, &(number(&links) + 1).to_be_bytes()),
                    ],
                })
            }
            Unlink { parent, name } => {
                let entry = key::dentry(self.ino(parent), name.as_bytes());
                let Some(value) = self.get(&entry) else { return Looked::Done(Err("ENOENT")) };
                let ino = Ino(number(&value));
                // Gone between the two looks: the commit will say so.
                let Some(links) = self.get(&key::inode(ino)) else { return Looked::Done(Err("ENOENT")) };
                let mut writes = vec![delete(&entry)];
                match number(&links) {
                    1 => {
                        writes.push(delete(&key::inode(ino)));
                        writes.push(Write::DeletePrefix(key::all_xattrs(ino)));
                    }
                    more => writes.push(put(&key::inode(ino), &(more - 1).to_be_bytes())),
                }
                Looked::Commit(Commit {
                    preconditions: vec![
                        Precondition::Equals(entry, value),
                        Precondition::Equals(key::inode(ino), links),
                    ],
                    writes,
                })
            }
            Rename { from, to } => {
                let old = key::dentry(self.ino(from.0), from.1.as_bytes());
                let new = key::dentry(self.ino(to.0), to.1.as_bytes());
                let guard = key::alive(self.ino(to.0));
                let Some(value) = self.get(&old) else { return Looked::Done(Err("ENOENT")) };
                if self.get(&guard).is_none() {
                    return Looked::Done(Err("ENOENT"));
                }
                if self.get(&new).is_some() {
                    return Looked::Done(Err("EEXIST"));
                }
                Looked::Commit(Commit {
                    preconditions: vec![
                        Precondition::Equals(old.clone(), value.clone()),
                        Precondition::Present(guard),
                        Precondition::Absent(new.clone()),
                    ],
                    writes: vec![delete(&old), put(&new, &value)],
                })
            }
        }
    }

    fn look_make(&self, parent: u64, name: &str, ino: u64, directory: bool) -> Looked {
        let guard = key::alive(self.ino(parent));
        let entry = key::dentry(self.ino(parent), name.as_bytes());
        if self.get(&guard).is_none() {
            return Looked::Done(Err("ENOENT"));
        }
        if self.get(&entry).is_some() {
            return Looked::Done(Err("EEXIST"));
        }
        let ino = self.ino(ino);
        let mut writes = vec![
            put(&entry, &ino.0.to_be_bytes()),
            put(&key::inode(ino), &1_u64.to_be_bytes()),
            put(&key::xattr(ino, b"user.x"), b"x"),
        ];
        if directory {
            writes.push(put(&key::alive(ino), b""));
        }
        Looked::Commit(Commit {
            preconditions: vec![Precondition::Present(guard), Precondition::Absent(entry)],
            writes,
        })
    }
}

/// Per run: root 1 with directory `d` (2) and file `f` (3).
const NUMBERS_PER_RUN: u64 = 100;

fn plant(store: &dyn MetaStore, base: u64) {
    let ino = |number| Ino(base + number);
    let mut writes = vec![put(&key::alive(ino(1)), b""), put(&key::alive(ino(2)), b"")];
    for (number, name) in [(2, "d"), (3, "f")] {
        writes.push(put(&key::dentry(ino(1), name.as_bytes()), &ino(number).0.to_be_bytes()));
        writes.push(put(&key::inode(ino(number)), &1_u64.to_be_bytes()));
    }
    write(store, writes);
}

/// What is there, relative to the base; checked for dangling names, wrong link counts and orphans.
fn tree(store: &dyn MetaStore, base: u64) -> BTreeMap<(u64, String), u64> {
    let mut names = BTreeMap::new();
    let mut links: BTreeMap<u64, u64> = BTreeMap::new();
    for number in 1..NUMBERS_PER_RUN {
        let prefix = key::dentries(Ino(base + number));
        for (entry, value) in store.scan(&prefix, &key::end_of(&prefix), usize::MAX, At::Latest).unwrap() {
            let alive = store.get(&key::alive(Ino(base + number)), At::Latest).unwrap();
            assert!(alive.is_some(), "a name in directory {number}, which is gone");
            let target = super::races::number(&value) - base;
            names.insert((number, String::from_utf8(key::name_of(&entry).to_vec()).unwrap()), target);
            *links.entry(target).or_default() += 1;
        }
    }
    for number in 2..NUMBERS_PER_RUN {
        let inode = store.get(&key::inode(Ino(base + number)), At::Latest).unwrap();
        let counted = links.get(&number).copied();
        assert_eq!(
            inode.map(|value| super::races::number(&value)),
            counted,
            "links of inode {number}: {names:?}"
        );
        if counted.is_none() {
            let xattrs = key::all_xattrs(Ino(base + number));
            assert_eq!(store.scan(&xattrs, &key::end_of(&xattrs), 1, At::Latest).unwrap(), []);
            assert_eq!(store.get(&key::alive(Ino(base + number)), At::Latest).unwrap(), None);
        }
    }
    names
}

type Outcome = (Vec<Told>, BTreeMap<(u64, String), u64>);

/// Runs the operations; `choices` says who moves where more than one can. Gives the choices that there were.
fn run(
    stores: &[Arc<dyn MetaStore>],
    base: u64,
    operations: &[Operation],
    choices: &[usize],
    flush: bool,
) -> (Outcome, Vec<(usize, usize)>, u32) {
    plant(&*stores[0], base);
    let mut actors: Vec<Actor> = operations
        .iter()
        .zip(stores)
        .map(|(&operation, store)| Actor {
            store: Arc::clone(store),
            base,
            operation,
            next: None,
            told: None,
            conflicts: 0,
        })
        .collect();
    let mut made = Vec::new();
    loop {
        let able: Vec<usize> = (0..actors.len()).filter(|&place| actors[place].told.is_none()).collect();
        if able.is_empty() {
            break;
        }
        let choice = choices.get(made.len()).copied().unwrap_or(0);
        made.push((choice, able.len()));
        actors[able[choice]].step();
        if flush {
            stores[0].sync().unwrap();
        }
    }
    let conflicts = actors.iter().map(|actor| actor.conflicts).sum();
    let told = actors.into_iter().filter_map(|actor| actor.told).collect();
    ((told, tree(&*stores[0], base)), made, conflicts)
}

fn orders(count: usize) -> Vec<Vec<usize>> {
    if count == 0 {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for shorter in orders(count - 1) {
        for place in 0..count {
            let mut order = shorter.clone();
            order.insert(place, count - 1);
            all.push(order);
        }
    }
    all
}

pub fn all_interleavings(world: &mut dyn World) {
    let scenarios: &[&[Operation]] = &[
        &[Create { parent: 2, name: "x", ino: 10 }, Rmdir { parent: 1, name: "d" }],
        &[Create { parent: 1, name: "x", ino: 10 }, Create { parent: 1, name: "x", ino: 11 }],
        &[Create { parent: 1, name: "x", ino: 10 }, Create { parent: 1, name: "y", ino: 11 }],
        &[Link { ino: 3, parent: 1, name: "g" }, Unlink { parent: 1, name: "f" }],
        &[Unlink { parent: 1, name: "f" }, Unlink { parent: 1, name: "f" }],
        &[Rmdir { parent: 1, name: "d" }, Rmdir { parent: 1, name: "d" }],
        &[Rename { from: (1, "f"), to: (2, "f") }, Rmdir { parent: 1, name: "d" }],
        &[Rename { from: (1, "f"), to: (1, "g") }, Unlink { parent: 1, name: "f" }],
        &[
            Mkdir { parent: 2, name: "x", ino: 10 },
            Rmdir { parent: 1, name: "d" },
            Create { parent: 2, name: "x", ino: 11 },
        ],
        &[
            Link { ino: 3, parent: 1, name: "g" },
            Link { ino: 3, parent: 2, name: "g" },
            Unlink { parent: 1, name: "f" },
        ],
        &[
            Rename { from: (1, "f"), to: (1, "g") },
            Create { parent: 1, name: "g", ino: 10 },
            Unlink { parent: 1, name: "f" },
        ],
        &[
            Rmdir { parent: 1, name: "d" },
            Mkdir { parent: 1, name: "d", ino: 10 },
            Create { parent: 2, name: "x", ino: 11 },
        ],
    ];
    let stores: Vec<Arc<dyn MetaStore>> = (0..3).map(|_| world.join()).collect();
    let mut base = 1_000;
    let mut next_base = || {
        base += NUMBERS_PER_RUN;
        base
    };
    let mut conflicts = 0;
    for operations in scenarios {
        let mut legal = BTreeSet::new();
        for order in orders(operations.len()) {
            let base = next_base();
            let ordered: Vec<Operation> = order.iter().map(|&place| operations[place]).collect();
            // Always the first who can move: one whole operation after the other.
            let ((told, tree), _, _) = run(&stores, base, &ordered, &[], false);
            let mut in_place = vec![Ok(()); told.len()];
            for (place, told) in order.iter().zip(told) {
                in_place[*place] = told;
            }
            legal.insert((in_place, tree));
        }
        for flush in [false, true] {
            let mut choices = Vec::new();
            let mut runs = 0;
            loop {
                let (outcome, made, conflicted) = run(&stores, next_base(), operations, &choices, flush);
                assert!(
                    legal.contains(&outcome),
                    "{operations:?} by {made:?} gave {outcome:?}, not of {legal:?}"
                );
                conflicts += conflicted;
                runs += 1;
                // The next schedule: the last choice that has an alternative takes it.
                choices = made.iter().map(|(choice, _)| *choice).collect();
                let last = made.iter().rposition(|(choice, able)| choice + 1 < *able);
                let Some(last) = last else { break };
                choices.truncate(last + 1);
                choices[last] += 1;
            }
            assert!(runs >= 6, "{operations:?}: {runs} schedules are not all");
        }
    }
    assert!(conflicts > 100, "{conflicts} conflicts: the schedules do not overlap");
}
