;; Matrix multiplication for gpt.js: y[i, r] = bias[r] + sum over c of x[i, c] w[r, c], for i < n, r < rows, c < cols.
;;
;; Addresses and strides (between rows) are in bytes; n and rows are at least 1; bias 0 means none. Each row of w is used
;; for all rows of x while it is in the CPU cache. matmul.wasm is this file compiled with wasmtime.wat2wasm of the
;; package wasmtime.
(module
  (import "memory" "memory" (memory 1))
  (func (export "matmul")
    (param $y i32) (param $x i32) (param $w i32) (param $bias i32)
    (param $n i32) (param $rows i32) (param $cols i32)
    (param $x_stride i32) (param $w_stride i32) (param $y_stride i32)
    (local $w_end i32)    ;; after the last row of w
    (local $end16 i32)    ;; within the row of w: end of the groups of 16 numbers,
    (local $end4 i32)     ;; end of the groups of 4,
    (local $end i32)      ;; end of the row
    (local $i i32) (local $xi i32) (local $yi i32)
    (local $a i32) (local $b i32)  ;; addresses in the rows of x and w
    (local $s0 v128) (local $s1 v128) (local $s2 v128) (local $s3 v128)
    (local $start f32) (local $sum f32)

    (local.set $cols (i32.shl (local.get $cols) (i32.const 2)))
    (local.set $w_end (i32.add (local.get $w) (i32.mul (local.get $rows) (local.get $w_stride))))
    (block $done
      (loop $row
        (br_if $done (i32.eq (local.get $w) (local.get $w_end)))
        (local.set $end16 (i32.add (local.get $w) (i32.and (local.get $cols) (i32.const -64))))
        (local.set $end4 (i32.add (local.get $w) (i32.and (local.get $cols) (i32.const -16))))
        (local.set $end (i32.add (local.get $w) (local.get $cols)))
        (local.set $start (f32.const 0))
        (if (local.get $bias)
          (then
            (local.set $start (f32.load (local.get $bias)))
            (local.set $bias (i32.add (local.get $bias) (i32.const 4)))))
        (local.set $xi (local.get $x))
        (local.set $yi (local.get $y))
        (local.set $i (local.get $n))
        (loop $token
          (local.set $a (local.get $xi))
          (local.set $b (local.get $w))
          (local.set $s0 (v128.const i32x4 0 0 0 0))
          (local.set $s1 (local.get $s0))
          (local.set $s2 (local.get $s0))
          (local.set $s3 (local.get $s0))
          (if (i32.ne (local.get $b) (local.get $end16))
            (then
              (loop $by16  ;; four independent sums hide the latency of additions
                (local.set $s0 (f32x4.add (local.get $s0)
                  (f32x4.mul (v128.load (local.get $a)) (v128.load (local.get $b)))))
                (local.set $s1 (f32x4.add (local.get $s1)
                  (f32x4.mul (v128.load offset=16 (local.get $a)) (v128.load offset=16 (local.get $b)))))
                (local.set $s2 (f32x4.add (local.get $s2)
                  (f32x4.mul (v128.load offset=32 (local.get $a)) (v128.load offset=32 (local.get $b)))))
                (local.set $s3 (f32x4.add (local.get $s3)
                  (f32x4.mul (v128.load offset=48 (local.get $a)) (v128.load offset=48 (local.get $b)))))
                (local.set $a (i32.add (local.get $a) (i32.const 64)))
                (br_if $by16 (i32.ne
                  (local.tee $b (i32.add (local.get $b) (i32.const 64)))
                  (local.get $end16))))))
          (local.set $s0 (f32x4.add
            (f32x4.add (local.get $s0) (local.get $s1))
            (f32x4.add (local.get $s2) (local.get $s3))))
          (if (i32.ne (local.get $b) (local.get $end4))
            (then
              (loop $by4
                (local.set $s0 (f32x4.add (local.get $s0)
                  (f32x4.mul (v128.load (local.get $a)) (v128.load (local.get $b)))))
                (local.set $a (i32.add (local.get $a) (i32.const 16)))
                (br_if $by4 (i32.ne
                  (local.tee $b (i32.add (local.get $b) (i32.const 16)))
                  (local.get $end4))))))
          (local.set $sum (f32.add (local.get $start) (f32.add
            (f32.add (f32x4.extract_lane 0 (local.get $s0)) (f32x4.extract_lane 1 (local.get $s0)))
            (f32.add (f32x4.extract_lane 2 (local.get $s0)) (f32x4.extract_lane 3 (local.get $s0))))))
          (if (i32.ne (local.get $b) (local.get $end))
            (then
              (loop $by1
                (local.set $sum (f32.add (local.get $sum)
                  (f32.mul (f32.load (local.get $a)) (f32.load (local.get $b)))))
                (local.set $a (i32.add (local.get $a) (i32.const 4)))
                (br_if $by1 (i32.ne
                  (local.tee $b (i32.add (local.get $b) (i32.const 4)))
                  (local.get $end))))))
          (f32.store (local.get $yi) (local.get $sum))
          (local.set $xi (i32.add (local.get $xi) (local.get $x_stride)))
          (local.set $yi (i32.add (local.get $yi) (local.get $y_stride)))
          (br_if $token (local.tee $i (i32.sub (local.get $i) (i32.const 1)))))
        (local.set $y (i32.add (local.get $y) (i32.const 4)))
        (local.set $w (i32.add (local.get $w) (local.get $w_stride)))
        (br $row)))))
