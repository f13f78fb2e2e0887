/* host_macros.h - macros that programs may define before they include amp.h, none of which may break it.  These are
 * attributes, keywords of other compilers, and helpers.  compile.sh includes this file before the declarations and before
 * the implementation.  Names that a program may define as a macro with arguments are defined here so that a call in amp.h
 * would not compile. */
#define unused __attribute__((unused))
#define used __attribute__((used))
#define packed __attribute__((packed))
#define target(x) __attribute__((target(x)))
#define section(x) __attribute__((section(x)))
#define visibility(x) __attribute__((visibility(x)))
#define hidden __attribute__((visibility("hidden")))
#define format(...) ampt broken
#define always_inline inline __attribute__((__always_inline__))
#define noinline __attribute__((__noinline__))
#define forceinline inline
#define aligned(n) __attribute__((aligned(n)))
#define align(n) __attribute__((aligned(n)))
#define vector_size(n) ampt broken
#define may_alias __attribute__((__may_alias__))
#define noreturn __attribute__((__noreturn__))
#define retain __attribute__((__used__))
#define weak __attribute__((weak))
#define alias(x) __attribute__((alias(x)))
#define pure __attribute__((pure))
#define hot __attribute__((hot))
#define cold __attribute__((cold))
#define constructor __attribute__((constructor))
#define destructor __attribute__((destructor))
#define nonnull __attribute__((nonnull))
#define nothrow
#define must_check __attribute__((warn_unused_result))
#define fallthrough __attribute__((fallthrough))
#define nodiscard __attribute__((warn_unused_result))
#define maybe_unused __attribute__((unused))
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)
#define barrier() ampt broken
#define prefetch(x) ampt broken
/* Keywords of other compilers and languages. */
#define near
#define far
#define huge
#define interface struct
#define small char
#define IN
#define OUT
#define OPTIONAL
#define CONST const
#define VOID void
#define BOOL int
#define TRUE 1
#define FALSE 0
#define ERROR 0
#define NO_ERROR 0
#define DELETE 1
#define Bool int
#define True 1
#define False 0
#define None 0
#define Status int
#define Success 0
#define Always 2
#define local static
#define internal static
#define persist static
#define public
#define private static
#define protected
#define procedure void
#define byte unsigned char
#define uchar unsigned char
#define u8 unsigned char
#define u16 unsigned short
#define u32 unsigned int
#define u64 unsigned long
#define i8 signed char
#define i16 short
#define i32 int
#define i64 long
#define f32 float
#define f64 double
#define real float
#define forever for (;;)
#define until(x) while (!(x))
#define unless(x) if (!(x))
#define elif else if
#define foreach(...) ampt broken
#define repeat(n) for (int n_ = 0; n_ < (n); n_++)
#define var __auto_type
#define let __auto_type
#define nil 0
#define index strchr
#define rindex strrchr
#define unix 1
#define linux 1
#define major(x) ampt broken
#define minor(x) ampt broken
#define PI 3.14159265
#define EPS 1e-8
#define N 64
#define M 32
#define K 16
#define T float
#define E 2.718
#define BATCH 32
#define SIZE 4
/* Helpers. */
#define error(...) ampt broken
#define check(...) ampt broken
#define assert(...) ampt broken
#define die(...) ampt broken
#define fatal(...) ampt broken
#define panic(...) ampt broken
#define warn(...) ampt broken
#define warning(...) ampt broken
#define info(...) ampt broken
#define debug(...) ampt broken
#define trace(...) ampt broken
#define log_info(...) ampt broken
#define print(...) ampt broken
#define expect(...) ampt broken
#define require(...) ampt broken
#define ensure(...) ampt broken
#define verify(...) ampt broken
#define test(...) ampt broken
#define fail(...) ampt broken
#define pass(...) ampt broken
#define skip(...) ampt broken
#define ok(...) ampt broken
#define min(...) ampt broken
#define max(...) ampt broken
#define MIN(...) ampt broken
#define MAX(...) ampt broken
#define ABS(...) ampt broken
#define CLAMP(...) ampt broken
#define clamp(...) ampt broken
#define swap(...) ampt broken
#define SWAP(...) ampt broken
#define sign(...) ampt broken
#define sqr(...) ampt broken
#define square(...) ampt broken
#define lerp(...) ampt broken
#define round_up(...) ampt broken
#define array_size(...) ampt broken
#define ARRAY_SIZE(...) ampt broken
#define countof(...) ampt broken
#define lengthof(...) ampt broken
#define container_of(...) ampt broken
#define alloc(...) ampt broken
#define new(...) ampt broken
#define delete(...) ampt broken
#define set(...) ampt broken
#define get(...) ampt broken
#define push(...) ampt broken
#define pop(...) ampt broken
#define add(...) ampt broken
#define mul(...) ampt broken
#define dot(...) ampt broken
#define sum(...) ampt broken
#define copy(...) ampt broken
#define fill(...) ampt broken
#define cast(...) ampt broken
#define load(...) ampt broken
#define save(...) ampt broken
#define run(...) ampt broken
#define task(...) ampt broken
#define begin(...) ampt broken
#define end(...) ampt broken
#define in(...) ampt broken
#define bit(...) ampt broken
#define row(...) ampt broken
#define col(...) ampt broken
#define at(...) ampt broken
#define lock(...) ampt broken
#define unlock(...) ampt broken
#define scale(...) ampt broken
#define update(...) ampt broken
#define transpose(...) ampt broken
#define X(...) ampt broken
