;; The kernels of gpt.js: the same functions as the methods of PlainKernels, which document the arguments. Addresses and
;; strides are in bytes, and 0 means none. A vector (v128) has 4 numbers.
;;
;; kernels.wasm is this file compiled with wasmtime.wat2wasm of the package wasmtime.
(module
  (import "memory" "memory" (memory 1))

  (func $matmul (export "matmul")
    (param $y i32) (param $x i32) (param $w i32) (param $bias i32)
    (param $n i32) (param $rows i32) (param $cols i32)
    (param $x_stride i32) (param $w_stride i32) (param $y_stride i32)
    (local $i i32) (local $xi i32) (local $yi i32) (local $end i32)
    (local $a i32) (local $b i32) (local $numbers v128) (local $start v128)
    (local $s0 v128) (local $s1 v128) (local $s2 v128) (local $s3 v128)  ;; sums of 4 rows, each in 4 parts
    (loop $rows
      (if (local.get $bias)
        (then
          (local.set $start (v128.load (local.get $bias)))
          (local.set $bias (i32.add (local.get $bias) (i32.const 16)))))
      (local.set $xi (local.get $x))
      (local.set $yi (local.get $y))
      (local.set $i (local.get $n))
      (loop $tokens  ;; the 4 rows of w stay in the CPU cache
        (local.set $a (local.get $xi))
        (local.set $b (local.get $w))
        (local.set $end (i32.add (local.get $a) (i32.shl (local.get $cols) (i32.const 2))))
        (local.set $s0 (v128.const i32x4 0 0 0 0))
        (local.set $s1 (local.get $s0))
        (local.set $s2 (local.get $s0))
        (local.set $s3 (local.get $s0))
        (loop $columns
          (local.set $numbers (v128.load (local.get $a)))
          (local.set $s0 (f32x4.add (local.get $s0)
            (f32x4.mul (local.get $numbers) (v128.load (local.get $b)))))
          (local.set $s1 (f32x4.add (local.get $s1)
            (f32x4.mul (local.get $numbers) (v128.load offset=16 (local.get $b)))))
          (local.set $s2 (f32x4.add (local.get $s2)
            (f32x4.mul (local.get $numbers) (v128.load offset=32 (local.get $b)))))
          (local.set $s3 (f32x4.add (local.get $s3)
            (f32x4.mul (local.get $numbers) (v128.load offset=48 (local.get $b)))))
          (local.set $b (i32.add (local.get $b) (i32.const 64)))
          (br_if $columns (i32.lt_u (local.tee $a (i32.add (local.get $a) (i32.const 16))) (local.get $end))))
        ;; Transpose and add: two parts of the sums of rows 0 and 1, and of rows 2 and 3; then their totals.
        (local.set $s0 (f32x4.add
          (i8x16.shuffle 0 1 2 3 16 17 18 19 4 5 6 7 20 21 22 23 (local.get $s0) (local.get $s1))
          (i8x16.shuffle 8 9 10 11 24 25 26 27 12 13 14 15 28 29 30 31 (local.get $s0) (local.get $s1))))
        (local.set $s2 (f32x4.add
          (i8x16.shuffle 0 1 2 3 16 17 18 19 4 5 6 7 20 21 22 23 (local.get $s2) (local.get $s3))
          (i8x16.shuffle 8 9 10 11 24 25 26 27 12 13 14 15 28 29 30 31 (local.get $s2) (local.get $s3))))
        (v128.store (local.get $yi) (f32x4.add (local.get $start) (f32x4.add
          (i8x16.shuffle 0 1 2 3 4 5 6 7 16 17 18 19 20 21 22 23 (local.get $s0) (local.get $s2))
          (i8x16.shuffle 8 9 10 11 12 13 14 15 24 25 26 27 28 29 30 31 (local.get $s0) (local.get $s2)))))
        (local.set $xi (i32.add (local.get $xi) (local.get $x_stride)))
        (local.set $yi (i32.add (local.get $yi) (local.get $y_stride)))
        (br_if $tokens (local.tee $i (i32.sub (local.get $i) (i32.const 1)))))
      (local.set $y (i32.add (local.get $y) (i32.const 16)))
      (local.set $w (i32.add (local.get $w) (i32.shl (local.get $w_stride) (i32.const 2))))
      (br_if $rows (i32.gt_s (local.tee $rows (i32.sub (local.get $rows) (i32.const 4))) (i32.const 0)))))

  ;; The sum of a vector's numbers.
  (func $sum (param $v v128) (result f32)
    (f32.add
      (f32.add (f32x4.extract_lane 0 (local.get $v)) (f32x4.extract_lane 1 (local.get $v)))
      (f32.add (f32x4.extract_lane 2 (local.get $v)) (f32x4.extract_lane 3 (local.get $v)))))

  ;; e^x = 2^n e^r with an integer n and |r| <= log(2) / 2, and the polynomial of Cephes for e^r. 0 below -87.7.
  (func $exp (param $x v128) (result v128)
    (local $n v128) (local $p v128)
    (local.set $x (f32x4.pmax (local.get $x) (v128.const f32x4 -88.03 -88.03 -88.03 -88.03)))  ;; keeps NaN
    (local.set $x (f32x4.pmin (local.get $x) (v128.const f32x4 88.37 88.37 88.37 88.37)))
    (local.set $n (f32x4.nearest
      (f32x4.mul (local.get $x) (v128.const f32x4 1.44269504 1.44269504 1.44269504 1.44269504))))
    (local.set $x (f32x4.sub (local.get $x)  ;; log(2) in two parts, for more digits
      (f32x4.mul (local.get $n) (v128.const f32x4 0.693359375 0.693359375 0.693359375 0.693359375))))
    (local.set $x (f32x4.add (local.get $x)
      (f32x4.mul (local.get $n) (v128.const f32x4 2.12194440e-4 2.12194440e-4 2.12194440e-4 2.12194440e-4))))
    (local.set $p (v128.const f32x4 1.9875691500e-4 1.9875691500e-4 1.9875691500e-4 1.9875691500e-4))
    (local.set $p (f32x4.add (f32x4.mul (local.get $p) (local.get $x))
      (v128.const f32x4 1.3981999507e-3 1.3981999507e-3 1.3981999507e-3 1.3981999507e-3)))
    (local.set $p (f32x4.add (f32x4.mul (local.get $p) (local.get $x))
      (v128.const f32x4 8.3334519073e-3 8.3334519073e-3 8.3334519073e-3 8.3334519073e-3)))
    (local.set $p (f32x4.add (f32x4.mul (local.get $p) (local.get $x))
      (v128.const f32x4 4.1665795894e-2 4.1665795894e-2 4.1665795894e-2 4.1665795894e-2)))
    (local.set $p (f32x4.add (f32x4.mul (local.get $p) (local.get $x))
      (v128.const f32x4 1.6666665459e-1 1.6666665459e-1 1.6666665459e-1 1.6666665459e-1)))
    (local.set $p (f32x4.add (f32x4.mul (local.get $p) (local.get $x))
      (v128.const f32x4 5.0000001201e-1 5.0000001201e-1 5.0000001201e-1 5.0000001201e-1)))
    (local.set $p (f32x4.add (f32x4.mul (f32x4.mul (local.get $p) (local.get $x)) (local.get $x)) (local.get $x)))
    (f32x4.mul
      (f32x4.add (local.get $p) (v128.const f32x4 1 1 1 1))
      (i32x4.shl  ;; the bits of 2^n
        (i32x4.add (i32x4.trunc_sat_f32x4_s (local.get $n)) (v128.const i32x4 127 127 127 127))
        (i32.const 23))))

  ;; x[i] += added[i] for i < count.
  (func (export "add") (param $x i32) (param $added i32) (param $count i32)
    (local $end i32)
    (local.set $end (i32.add (local.get $x) (i32.shl (local.get $count) (i32.const 2))))
    (loop $numbers
      (v128.store (local.get $x) (f32x4.add (v128.load (local.get $x)) (v128.load (local.get $added))))
      (local.set $added (i32.add (local.get $added) (i32.const 16)))
      (br_if $numbers
        (i32.lt_u (local.tee $x (i32.add (local.get $x) (i32.const 16))) (local.get $end)))))

  ;; One row of C numbers, a multiple of 4.
  (func (export "norm") (param $y i32) (param $x i32) (param $weight i32) (param $bias i32) (param $C i32)
    (local $size i32) (local $c i32) (local $mean v128) (local $sum v128) (local $v v128) (local $scale v128)
    (local.set $size (i32.shl (local.get $C) (i32.const 2)))
    (loop $sum
      (local.set $sum (f32x4.add (local.get $sum) (v128.load (i32.add (local.get $x) (local.get $c)))))
      (br_if $sum (i32.ne (local.tee $c (i32.add (local.get $c) (i32.const 16))) (local.get $size))))
    (local.set $mean
      (f32x4.splat (f32.div (call $sum (local.get $sum)) (f32.convert_i32_u (local.get $C)))))
    (local.set $sum (v128.const i32x4 0 0 0 0))
    (local.set $c (i32.const 0))
    (loop $squares
      (local.set $v (f32x4.sub (v128.load (i32.add (local.get $x) (local.get $c))) (local.get $mean)))
      (local.set $sum (f32x4.add (local.get $sum) (f32x4.mul (local.get $v) (local.get $v))))
      (br_if $squares (i32.ne (local.tee $c (i32.add (local.get $c) (i32.const 16))) (local.get $size))))
    (local.set $scale (f32x4.splat (f32.div (f32.const 1) (f32.sqrt (f32.add
      (f32.div (call $sum (local.get $sum)) (f32.convert_i32_u (local.get $C)))
      (f32.const 1e-5))))))
    (local.set $c (i32.const 0))
    (loop $numbers
      (local.set $v (f32x4.sub (v128.load (i32.add (local.get $x) (local.get $c))) (local.get $mean)))
      (local.set $v (f32x4.mul
        (f32x4.mul (local.get $v) (local.get $scale))
        (v128.load (i32.add (local.get $weight) (local.get $c)))))
      (if (local.get $bias)
        (then (local.set $v
          (f32x4.add (local.get $v) (v128.load (i32.add (local.get $bias) (local.get $c)))))))
      (v128.store (i32.add (local.get $y) (local.get $c)) (local.get $v))
      (br_if $numbers (i32.ne (local.tee $c (i32.add (local.get $c) (i32.const 16))) (local.get $size)))))

  ;; The activations, for `count` numbers in place: see ACTIVATIONS.
  (func (export "gelu") (param $x i32) (param $count i32)
    (local $end i32) (local $v v128) (local $t v128) (local $tail v128)
    (local.set $end (i32.add (local.get $x) (i32.shl (local.get $count) (i32.const 2))))
    (loop $numbers
      (local.set $v (v128.load (local.get $x)))
      (local.set $t (f32x4.div (v128.const f32x4 1 1 1 1) (f32x4.add (v128.const f32x4 1 1 1 1)
        (f32x4.mul (v128.const f32x4 0.3 0.3 0.3 0.3) (f32x4.abs (local.get $v))))))
      (local.set $tail (f32x4.mul (local.get $t)
        (v128.const f32x4 -0.02087826143 -0.02087826143 -0.02087826143 -0.02087826143)))
      (local.set $tail (f32x4.mul (local.get $t) (f32x4.add (local.get $tail)
        (v128.const f32x4 0.1138065163 0.1138065163 0.1138065163 0.1138065163))))
      (local.set $tail (f32x4.mul (local.get $t) (f32x4.add (local.get $tail)
        (v128.const f32x4 -0.2314002865 -0.2314002865 -0.2314002865 -0.2314002865))))
      (local.set $tail (f32x4.mul (local.get $t) (f32x4.add (local.get $tail)
        (v128.const f32x4 0.1959741857 0.1959741857 0.1959741857 0.1959741857))))
      (local.set $tail (f32x4.mul (local.get $t) (f32x4.add (local.get $tail)
        (v128.const f32x4 -0.08284755081 -0.08284755081 -0.08284755081 -0.08284755081))))
      (local.set $tail (f32x4.mul (local.get $t) (f32x4.add (local.get $tail)
        (v128.const f32x4 0.09795569746 0.09795569746 0.09795569746 0.09795569746))))
      (local.set $tail (f32x4.mul (local.get $t) (f32x4.add (local.get $tail)
        (v128.const f32x4 0.07778385839 0.07778385839 0.07778385839 0.07778385839))))
      (local.set $tail (f32x4.mul (local.get $t) (f32x4.add (local.get $tail)
        (v128.const f32x4 0.1103611909 0.1103611909 0.1103611909 0.1103611909))))
      (local.set $tail (f32x4.mul (local.get $t) (f32x4.add (local.get $tail)
        (v128.const f32x4 0.1195572413 0.1195572413 0.1195572413 0.1195572413))))
      (local.set $tail (f32x4.mul (local.get $t) (f32x4.add (local.get $tail)
        (v128.const f32x4 0.1196874067 0.1196874067 0.1196874067 0.1196874067))))
      (local.set $tail (f32x4.mul (local.get $tail) (call $exp (f32x4.mul (local.get $v)
        (f32x4.mul (local.get $v) (v128.const f32x4 -0.5 -0.5 -0.5 -0.5))))))
      (v128.store (local.get $x) (f32x4.mul (local.get $v) (v128.bitselect
        (local.get $tail)
        (f32x4.sub (v128.const f32x4 1 1 1 1) (local.get $tail))
        (f32x4.lt (local.get $v) (v128.const f32x4 0 0 0 0)))))
      (br_if $numbers
        (i32.lt_u (local.tee $x (i32.add (local.get $x) (i32.const 16))) (local.get $end)))))

  (func (export "gelu_new") (param $x i32) (param $count i32)
    (local $end i32) (local $v v128) (local $u v128)
    (local.set $end (i32.add (local.get $x) (i32.shl (local.get $count) (i32.const 2))))
    (loop $numbers
      (local.set $v (v128.load (local.get $x)))
      (local.set $u (f32x4.mul (local.get $v) (f32x4.mul (local.get $v) (local.get $v))))
      (local.set $u (f32x4.add (local.get $v)
        (f32x4.mul (local.get $u) (v128.const f32x4 0.044715 0.044715 0.044715 0.044715))))
      (local.set $u (call $exp (f32x4.mul (local.get $u)
        (v128.const f32x4 -1.5957691216 -1.5957691216 -1.5957691216 -1.5957691216))))
      (v128.store (local.get $x)
        (f32x4.div (local.get $v) (f32x4.add (v128.const f32x4 1 1 1 1) (local.get $u))))
      (br_if $numbers
        (i32.lt_u (local.tee $x (i32.add (local.get $x) (i32.const 16))) (local.get $end)))))

  ;; x (count,) = softmax(scale x + biases), followed by zeros up to a multiple of 4.
  (func $softmax (param $x i32) (param $count i32) (param $scale f32) (param $biases i32)
    (local $a i32) (local $end i32) (local $v v128) (local $factor v128) (local $max v128) (local $sum v128)
    (local.set $end (i32.add (local.get $x) (i32.shl (local.get $count) (i32.const 2))))
    (v128.store (local.get $end) (v128.const f32x4 -inf -inf -inf -inf))  ;; become the zeros
    (local.set $factor (f32x4.splat (local.get $scale)))
    (local.set $max (v128.const f32x4 -inf -inf -inf -inf))
    (local.set $a (local.get $x))
    (loop $scores
      (local.set $v (f32x4.mul (v128.load (local.get $a)) (local.get $factor)))
      (if (local.get $biases)
        (then
          (local.set $v (f32x4.add (local.get $v) (v128.load (local.get $biases))))
          (local.set $biases (i32.add (local.get $biases) (i32.const 16)))))
      (v128.store (local.get $a) (local.get $v))
      (local.set $max (f32x4.max (local.get $max) (local.get $v)))
      (br_if $scores (i32.lt_u (local.tee $a (i32.add (local.get $a) (i32.const 16))) (local.get $end))))
    (local.set $max (f32x4.splat (f32.max
      (f32.max (f32x4.extract_lane 0 (local.get $max)) (f32x4.extract_lane 1 (local.get $max)))
      (f32.max (f32x4.extract_lane 2 (local.get $max)) (f32x4.extract_lane 3 (local.get $max))))))
    (local.set $a (local.get $x))
    (loop $exponentials
      (local.set $v (call $exp (f32x4.sub (v128.load (local.get $a)) (local.get $max))))
      (v128.store (local.get $a) (local.get $v))
      (local.set $sum (f32x4.add (local.get $sum) (local.get $v)))
      (br_if $exponentials
        (i32.lt_u (local.tee $a (i32.add (local.get $a) (i32.const 16))) (local.get $end))))
    (local.set $sum (f32x4.splat (call $sum (local.get $sum))))
    (loop $weights
      (v128.store (local.get $x) (f32x4.div (v128.load (local.get $x)) (local.get $sum)))
      (br_if $weights (i32.lt_u (local.tee $x (i32.add (local.get $x) (i32.const 16))) (local.get $end)))))

  ;; The address of an element in a packed matrix, relative to its start.
  (func $packed (param $row i32) (param $col i32) (param $stride i32) (result i32)
    (i32.add
      (i32.add
        (i32.mul (i32.and (local.get $row) (i32.const -4)) (local.get $stride))
        (i32.shl (i32.and (local.get $col) (i32.const -4)) (i32.const 4)))
      (i32.add
        (i32.shl (i32.and (local.get $row) (i32.const 3)) (i32.const 4))
        (i32.shl (i32.and (local.get $col) (i32.const 3)) (i32.const 2)))))

  (func (export "attend")
    (param $z i32) (param $qkv i32) (param $keys i32) (param $values i32) (param $scores i32) (param $biases i32)
    (param $H i32) (param $D i32) (param $slots i32) (param $slot i32) (param $count i32) (param $bias_stride i32)
    (local $head_size i32) (local $key_stride i32) (local $value_stride i32) (local $cache_size i32)
    (local $end i32) (local $k i32) (local $v i32) (local $d i32)
    (local.set $head_size (i32.shl (local.get $D) (i32.const 2)))
    (local.set $key_stride (i32.and (i32.add (local.get $head_size) (i32.const 15)) (i32.const -16)))
    (local.set $value_stride (i32.shl (local.get $slots) (i32.const 2)))
    (local.set $cache_size (i32.mul (local.get $slots) (local.get $key_stride)))  ;; keys of a head
    (local.set $k (i32.add (local.get $qkv) (i32.mul (local.get $H) (local.get $head_size))))
    (local.set $v (i32.add (local.get $k) (i32.mul (local.get $H) (local.get $head_size))))
    (local.set $end (local.get $k))  ;; of the queries
    (loop $heads
      (local.set $d (i32.const 0))
      (loop $channels
        (f32.store
          (i32.add (local.get $keys) (call $packed (local.get $slot) (local.get $d) (local.get $key_stride)))
          (f32.load (local.get $k)))
        (f32.store
          (i32.add (local.get $values) (call $packed (local.get $d) (local.get $slot) (local.get $value_stride)))
          (f32.load (local.get $v)))
        (local.set $k (i32.add (local.get $k) (i32.const 4)))
        (local.set $v (i32.add (local.get $v) (i32.const 4)))
        (br_if $channels (i32.ne (local.tee $d (i32.add (local.get $d) (i32.const 1))) (local.get $D))))
      (call $matmul (local.get $scores) (local.get $qkv) (local.get $keys) (i32.const 0)
        (i32.const 1) (local.get $count) (local.get $D) (i32.const 0) (local.get $key_stride) (i32.const 0))
      (call $softmax (local.get $scores) (local.get $count)
        (f32.div (f32.const 1) (f32.sqrt (f32.convert_i32_u (local.get $D)))) (local.get $biases))
      (call $matmul (local.get $z) (local.get $scores) (local.get $values) (i32.const 0)
        (i32.const 1) (local.get $D) (local.get $count) (i32.const 0) (local.get $value_stride) (i32.const 0))
      (local.set $z (i32.add (local.get $z) (local.get $head_size)))
      (local.set $keys (i32.add (local.get $keys) (local.get $cache_size)))
      (local.set $values (i32.add (local.get $values) (local.get $cache_size)))
      (if (local.get $biases)
        (then (local.set $biases (i32.add (local.get $biases) (local.get $bias_stride)))))
      (br_if $heads
        (i32.ne (local.tee $qkv (i32.add (local.get $qkv) (local.get $head_size))) (local.get $end))))))
