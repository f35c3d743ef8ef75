//! Stream frames, float32 numbers on standard input, through a packed model; print its scores and the hash of their bits.
//!
//!     cargo run --offline --release --example scores -- demo.cnorm < frames.f32
use std::io::{stdin, Read};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: scores MODEL.cnorm < FRAMES")?;
    let model = cnorm::Model::from_bytes(&std::fs::read(path)?)?;
    let mut stream = model.stream()?;
    let mut input = Vec::new();
    stdin().read_to_end(&mut input)?;
    let frames: Vec<f32> = input.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let mut y = vec![0.0; model.outputs()];
    let mut hash = 0xcbf29ce484222325u64; // FNV-1a
    for x in frames.chunks_exact(model.inputs()) {
        stream.step(x, &mut y)?;
        for byte in y.iter().flat_map(|v| v.to_le_bytes()) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x100000001b3);
        }
        println!("{}", y.iter().map(|v| format!("{v:.4}")).collect::<Vec<_>>().join(" "));
    }
    println!("hash {hash:016x}");
    Ok(())
}
