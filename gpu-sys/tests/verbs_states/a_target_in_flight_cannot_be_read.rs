use gpu_sys::verbs::{Landing, MemoryRegion, Post, Remote, Signal};

fn look<T: Landing + AsRef<[u8]>>(target: T, region: &MemoryRegion, remote: Remote) -> u8 {
    let post = Post::read(target, region, remote, Signal::Yes);
    let first = target.as_ref()[0];
    drop(post);
    first
}

fn main() {}
