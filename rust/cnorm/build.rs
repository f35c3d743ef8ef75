//! Compiles cnorm.c with $CC (no crate is needed), or links the library in the folder CNORM_LIB_DIR.
//!
//! cnorm.c is that of the folder CNORM_SOURCE, or is written by src/amalgamate.py of the repository around this crate.
use std::{env, path::Path, path::PathBuf, process::Command};

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?} failed");
}

fn depends_on(path: &Path) {
    println!("cargo:rerun-if-changed={}", path.display());
}

fn main() {
    for name in ["CC", "CNORM_LIB_DIR", "CNORM_SOURCE"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    depends_on(Path::new("build.rs"));
    let out = PathBuf::from(env::var("OUT_DIR").unwrap());
    if let Ok(folder) = env::var("CNORM_LIB_DIR") {
        depends_on(&Path::new(&folder).join("libcnorm.a"));
        println!("cargo:rustc-link-search=native={folder}");
    } else {
        let source = if let Ok(folder) = env::var("CNORM_SOURCE") {
            let folder = PathBuf::from(folder);
            depends_on(&folder.join("cnorm.c"));
            depends_on(&folder.join("cnorm.h"));
            folder
        } else {
            let sources = PathBuf::from(env::var("CARGO_MANIFEST_DIR").unwrap()).join("../../src");
            depends_on(&sources);
            run(Command::new("python3").arg(sources.join("amalgamate.py")).arg(&out));
            out.clone()
        };
        let compiler = env::var("CC").unwrap_or_else(|_| "cc".into()); // may have arguments: "ccache cc"
        let mut words = compiler.split_whitespace();
        let mut compile = Command::new(words.next().expect("CC is empty"));
        let object = out.join("cnorm.o");
        run(compile.args(words).args(["-O2", "-fPIC", "-c", "-o"]).arg(&object).arg(source.join("cnorm.c")));
        run(Command::new("ar").arg("rcs").arg(out.join("libcnorm.a")).arg(&object));
        println!("cargo:rustc-link-search=native={}", out.display());
    }
    println!("cargo:rustc-link-lib=static=cnorm");
    println!("cargo:rustc-link-lib=m");
}
