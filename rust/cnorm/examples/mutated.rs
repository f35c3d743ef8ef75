//! Open, step, save and restore mutated packed models; print what they came to, and the most memory that one took.
//!
//!     python tests/fuzz/packed_models.py seeds && cargo run --offline --release --example mutated -- seeds 100000
//!
//! Sizes and the checksum of the head are made right, as a hostile author would. An input follows from its number alone;
//! one that takes more than 64 MB and four times its size is named, and the exit code is then 1.
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The system's allocator, which counts.
struct Counting;
static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes every call on
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        MOST.fetch_max(NOW.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        System.alloc(layout)
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        MOST.fetch_max(NOW.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        System.alloc_zeroed(layout)
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        System.dealloc(at, layout)
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// SplitMix64
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e3779b97f4a7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58476d1ce4e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d049bb133111eb);
        ((z ^ z >> 31) % n as u64) as usize
    }
}

fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for &byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { 0xedb88320 } else { 0 };
        }
    }
    !crc
}

const VALUES: [u64; 12] = [0, 1, 2, 7, 63, 64, 1 << 12, 1 << 20, 1 << 31, 1 << 33, u64::MAX, i64::MAX as u64];

/// A seed with up to eight changes to bits, 4-byte and 8-byte numbers or its end, mostly before the data.
fn mutated(seed: &[u8], random: &mut Random) -> Vec<u8> {
    let mut file = seed.to_vec();
    let data = (u64::from_ne_bytes(file[32..40].try_into().unwrap()) as usize).clamp(8, file.len());
    for _ in 0..=random.below(8) {
        let end = if random.below(8) == 0 { file.len() } else { data };
        let at = random.below(end).min(file.len() - 8);
        let field = at / 4 * 4;
        match random.below(8) {
            0..=2 => file[at] ^= 1 << random.below(8),
            3..=4 => file[field..field + 4].copy_from_slice(&(VALUES[random.below(12)] as u32).to_ne_bytes()),
            5..=6 => file[field..field + 8].copy_from_slice(&VALUES[random.below(12)].to_ne_bytes()),
            _ => file.resize(data.max(64) + random.below(2 * file.len()), 0),
        }
    }
    let size = file.len() as u64;
    file[24..32].copy_from_slice(&size.to_ne_bytes());
    let data = u64::from_ne_bytes(file[32..40].try_into().unwrap()) as usize;
    if (12..=file.len()).contains(&data) {
        let crc = crc32(&file[12..data]);
        file[8..12].copy_from_slice(&crc.to_ne_bytes());
    }
    file
}

/// Whether the file opened as a model.
fn tried(file: &[u8]) -> bool {
    let Ok(model) = cnorm::Model::from_bytes(file) else { return false };
    let Ok(mut stream) = model.stream() else { return true };
    let (x, mut y) = (vec![1.0; model.inputs()], vec![0.0; model.outputs()]);
    for _ in 0..2 {
        if let Err(error) = stream.step(&x, &mut y) {
            assert_eq!(error.status, cnorm::Error::TOKEN, "{error}"); // the frames are no ids for every file
        }
    }
    if let Ok(saved) = stream.save() {
        let restored = stream.restore(&saved);
        assert!(restored.is_ok() || !stream.is_finite(), "{restored:?}"); // hostile weights give infinities
    }
    true
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [folder, count] = &words[..] else { return Err("usage: mutated FOLDER COUNT".into()) };
    let mut paths: Vec<_> = std::fs::read_dir(folder)?.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let seeds: Vec<Vec<u8>> = paths.iter().map(std::fs::read).collect::<Result<_, _>>()?;
    let (count, mut opened, mut beyond, mut worst) = (count.parse::<usize>()?, 0, 0, 0);
    for number in 0..count {
        let mut random = Random(number as u64);
        let file = mutated(&seeds[random.below(seeds.len())], &mut random);
        let before = NOW.load(Relaxed);
        MOST.store(before, Relaxed);
        opened += usize::from(tried(&file));
        let took = MOST.load(Relaxed) - before;
        worst = worst.max(took);
        if took > (64 << 20) + 4 * file.len() {
            println!("input {number}: {took} bytes for a file of {}", file.len());
            beyond += 1;
        }
    }
    println!("{count} files of {} seeds: {opened} opened, {beyond} beyond the bound, at most {worst} bytes", seeds.len());
    std::process::exit(i32::from(beyond > 0));
}
