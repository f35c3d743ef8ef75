//! Compiles cnorm.c with $CC (no crate is needed), or links the library in the folder CNORM_LIB_DIR.
//!
//! cnorm.c is that of the folder CNORM_SOURCE, or is written by src/amalgamate.py of the repository around this crate.
use std::{env, path::PathBuf, process::Command};

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?} failed");
}

fn main() {
    for name in ["CC", "CNORM_LIB_DIR", "CNORM_SOURCE"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let out = PathBuf::from(env::var("OUT_DIR").unwrap());
    if let Ok(folder) = env::var("CNORM_LIB_DIR") {
        println!("cargo:rustc-link-search=native={folder}");
    } else {
        let source = env::var("CNORM_SOURCE").map(PathBuf::from).unwrap_or_else(|_| {
            let script = PathBuf::from(env::var("CARGO_MANIFEST_DIR").unwrap()).join("../../src/amalgamate.py");
            run(Command::new("python3").arg("-P").arg(script).arg(&out));
            out.clone()
        });
        let compiler = env::var("CC").unwrap_or_else(|_| "cc".into());
        let object = out.join("cnorm.o");
        run(Command::new(compiler).args(["-O2", "-fPIC", "-c", "-o"]).arg(&object).arg(source.join("cnorm.c")));
        run(Command::new("ar").arg("rcs").arg(out.join("libcnorm.a")).arg(&object));
        println!("cargo:rustc-link-search=native={}", out.display());
    }
    println!("cargo:rustc-link-lib=static=cnorm");
    println!("cargo:rustc-link-lib=m");
}
