/** Types of index.mjs. */

/** 0 done, 1 a check failed, 2 wrong input or a damaged bundle, 3 this machine cannot. */
export declare const EXIT: Readonly<{ done: 0; check: 1; input: 2; machine: 3 }>;

/** The bundle this app was made for, a path. */
export declare const DEFAULT_BUNDLE: string;

/** One line that names the thing, what was found and what was wanted. */
export declare class TfxError extends Error {
  constructor(message: string, exitCode?: number);
  /** What a command line tool would exit with: 1, 2 or 3, as in EXIT. */
  exitCode: number;
}

export type Dtype =
  | "bool" | "int8" | "int16" | "int32" | "int64" | "uint8" | "uint16" | "uint32" | "uint64"
  | "float16" | "float32" | "float64";

export interface TensorSpec {
  name: string;
  dtype: Dtype;
  /** A size, or the name of an axis: "batch", "sequence". */
  shape: (string | number)[];
}

export interface InputSpec extends TensorSpec {
  role: "token_ids" | "attention_mask" | "padding_mask" | "token_type_ids" | "position_ids" | "features";
  /** Integers are smaller than this. */
  limit: number | null;
}

/** What the bundle's tfx.json says; these are the fields an app needs. */
export interface Manifest {
  format: 1;
  source: { kind: string; name: string; [key: string]: unknown };
  inputs: InputSpec[];
  outputs: TensorSpec[];
  max_length: number | null;
  pad_id: number;
  pooling: { mode: "cls" | "mean" | "max" | "last"; normalize: boolean; output: string } | null;
  tokenizer: { file: string; max_length: number | null } | null;
  target: string;
  precision: string;
  layout: "padded" | "ragged";
  model: { file: string; opset: number; ir_version: number; domains: string[] };
  tolerance: { max_abs: number | null; min_cosine: number | null; min_token_cosine?: number | null };
  files: Record<string, { bytes: number; sha256: string }>;
  quantization?: { scheme: string; batch_variance?: number | null; [key: string]: unknown } | null;
  tuning?: { threads: number | null; spinning: boolean | null; [key: string]: unknown } | null;
  [key: string]: unknown;
}

export type TypedArray =
  | Int8Array | Uint8Array | Int16Array | Uint16Array | Int32Array | Uint32Array | BigInt64Array | BigUint64Array
  | Float32Array | Float64Array;

export interface Tensor {
  /** The graph's; numbers of float16 are handed out as a Float32Array. */
  dtype: Dtype;
  shape: number[];
  data: TypedArray;
}

export interface Tokens {
  /** Special tokens added. */
  ids: number[];
  types: number[];
  /** How many tokens were cut off to fit the longest that the model takes. */
  cut: number;
}

export interface OpenOptions {
  /** Threads inside an operator; by default what the bundle was tuned to, else onnxruntime's choice. */
  threads?: number;
}

export interface TextOptions {
  /** Texts in one call of the model, 32 by default. */
  batchSize?: number;
  /** Told after each call how many texts are done. */
  onProgress?: (done: number, total: number) => void;
  /** Told of each text that is longer than the model takes, and how many tokens were cut off. */
  onCut?: (text: number, cut: number) => void;
  /** Told once how many tokens each text has, and how many were cut off, before the texts run. */
  onTokens?: (tokens: { count: number; cut: number }[]) => void;
}

export type Nested = (number | bigint | boolean | Nested)[];

/** Nested arrays, or flat data with its shape (as onnxruntime's own tensors have it, under the name dims). */
export type Feed =
  | Nested
  | { data: TypedArray | readonly (number | bigint | boolean)[]; shape: readonly number[] }
  | { data: TypedArray; dims: readonly number[] };

/** A loaded bundle; made by open(). */
export interface Encoder {
  readonly manifest: Manifest;
  /** Where the model runs. */
  readonly provider: "cpu";
  /** Such as "onnxruntime 1.30.0". */
  readonly runtime: string;
  /** Token ids of each text. Throws a TfxError that names the text and the character that cannot be done exactly. */
  tokenize(texts: readonly string[]): Tokens[];
  /** One vector per text, in the order given. */
  embed(texts: readonly string[], options?: TextOptions): Promise<Float32Array[]>;
  /** Every output of every text, without the batch axis, cut to the text's own length. */
  runTexts(texts: readonly string[], options?: TextOptions): Promise<Record<string, Tensor>[]>;
  /**
   * Run the model once on arrays. Integers are cast where nothing is lost, between number[], Int32Array and
   * BigInt64Array; floats for integers are refused. A missing mask attends everywhere.
   */
  run(feeds: Readonly<Record<string, Feed>>, outputs?: readonly string[]): Promise<Record<string, Tensor>>;
  /** Give the model's memory back, after the calls that run. */
  dispose(): Promise<void>;
}

/** Open a bundle: every file is checked, the model and the tokenizer are loaded. */
export declare function open(bundle?: string, options?: OpenOptions): Promise<Encoder>;

export interface Stage {
  stage: "files" | "runtime" | "tokens" | "outputs" | "vectors";
  passed: boolean;
  /** Files, texts, or outputs of golden cases. */
  checked?: number;
  max_abs?: number | null;
  min_cosine?: number | null;
}

export interface Report {
  app: string;
  passed: boolean;
  /** The first stage that failed. */
  stage: Stage["stage"] | null;
  problem: string | null;
  runtime: string | null;
  library: string | null;
  provider: string | null;
  precision: string;
  target: string;
  layout: string;
  /** Worst of outputs and vectors. */
  max_abs: number | null;
  min_cosine: number | null;
  stages: Stage[];
  /** Largest difference of a text's vector alone and beside others. */
  batch_variance: number | null;
  promised_batch_variance: number | null;
}

export interface CheckOptions extends OpenOptions {
  onProgress?: (state: { stage: string; done: number; total: number }) => void;
}

/** Check a bundle on this machine against what was recorded when it was exported. */
export declare function selfCheck(
  bundle?: string,
  options?: CheckOptions,
): Promise<{ report: Report; exitCode: 0 | 1 | 3; lines: string[] }>;

/** The report as people read it: a line per stage, and the verdict. */
export declare function reportLines(report: Report, tolerance: Manifest["tolerance"]): string[];
