package torture

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/pgratelimit/pgratelimit/tests/kit"
)

// An argument is a value and how it is sent; or what the server refuses before any function is called,
// because it cannot read it as text, number, interval …
type argument struct {
	value  any    // as a kit.Call has it
	text   []byte // nil for null
	binary []byte // only for the extended protocol, where it is not nil

	// The SQLSTATEs that it may be refused with. None: the value arrives.
	unreadable []string
}

// What the server says of bytes that are no value of a type. None of these comes from the package:
//
//	22021 not text in UTF-8, or has a zero byte
//	08P01 a zero byte in the simple protocol, where it ends the statement; or a binary value cut short
//	22P02 no integer, boolean or array; 22003 no 32 or 64 bits can hold it
//	22007 no interval or timestamptz; 22008, 22009, 22015 none that PostgreSQL can hold
//	22P03 no binary value of that type; 42804 an array of something else
//	2202E, 54000 array bounds or dimensions beyond what PostgreSQL can hold
var unreadable = struct{ text, number, boolean, interval, instant, array, binary []string }{
	text: []string{"22021", "08P01"}, number: []string{"22P02", "22003"}, boolean: []string{"22P02"},
	interval: []string{"22007", "22008", "22015"}, instant: []string{"22007", "22008", "22009"},
	array: []string{"22P02", "2202E", "54000", "22003"}, binary: []string{"08P01", "22P03", "22021", "42804", "2202E", "54000"},
}

var null = argument{}

// bad is text that its type refuses, and 22021 or 08P01 when no type would take it.
func bad(text string, codes []string) argument {
	if !utf8.ValidString(text) || strings.Contains(text, "\x00") {
		codes = slices.Concat(codes, unreadable.text)
	}
	return argument{text: []byte(text), unreadable: codes}
}

// encode is a value of a type of PostgreSQL.
func encode(of string, value any) argument {
	a := argument{value: value}
	switch v := value.(type) {
	case string:
		if a.text, a.binary = []byte(v), []byte(v); !utf8.ValidString(v) || strings.Contains(v, "\x00") {
			a.unreadable = unreadable.text
		}
	case int64:
		a.text, a.binary = strconv.AppendInt(nil, v, 10), binary.BigEndian.AppendUint64(nil, uint64(v))
		if of == "integer" {
			a.binary = append32(nil, v)
		}
	case bool:
		if a.text, a.binary = strconv.AppendBool(nil, v), []byte{0}; v {
			a.binary[0] = 1
		}
	case kit.Span:
		a.text = fmt.Appendf(nil, "%d mons %d days %d microseconds", v.Months, v.Days, v.Us)
		a.binary = append32(binary.BigEndian.AppendUint64(nil, uint64(v.Us)), int64(v.Days), int64(v.Months))
	case kit.Instant:
		text, since2000 := map[kit.Instant]string{kit.Infinity: "infinity", kit.NegativeInfinity: "-infinity"}[v], int64(v)
		if text == "" { // between the years 1 and 200,000
			layout := map[string]string{"timestamp": "2006-01-02 15:04:05.999999", "timestamptz": "2006-01-02 15:04:05.999999Z07:00"}[of]
			text = time.UnixMicro(int64(v)).UTC().Format(layout)
			since2000 -= time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro()
		}
		a.text, a.binary = []byte(text), binary.BigEndian.AppendUint64(nil, uint64(since2000))
	}
	return a
}

// append32 appends numbers of 32 bits.
func append32(bytes []byte, numbers ...int64) []byte {
	for _, n := range numbers {
		bytes = binary.BigEndian.AppendUint32(bytes, uint32(n))
	}
	return bytes
}

// arrayArgument sends elements, nil for null, in any shape: the function sees them one after another.
func arrayArgument[T any](values []*T, of string, shape []pgtype.ArrayDimension) argument {
	oid := map[string]uint32{"text": pgtype.TextArrayOID, "bigint": pgtype.Int8ArrayOID, "integer": pgtype.Int4ArrayOID}[of]
	return argument{value: values, text: wire(oid, pgtype.TextFormatCode, values, shape), binary: wire(oid, pgtype.BinaryFormatCode, values, shape)}
}

// types remembers how it encodes, and callers draw beside each other.
var (
	types   = pgtype.NewMap()
	typesMu sync.Mutex
)

func wire[T any](oid uint32, format int16, values []*T, shape []pgtype.ArrayDimension) []byte {
	typesMu.Lock()
	defer typesMu.Unlock()
	bytes, err := types.Encode(oid, format, pgtype.Array[*T]{Elements: values, Dims: shape, Valid: true}, nil)
	if err != nil {
		panic(err)
	}
	return bytes
}

// fuzzed makes arguments, good and bad ones.
type fuzzed struct{ *rand.Rand }

func oneOf[T any](f fuzzed, values []T) T { return values[f.IntN(len(values))] }

// oneIn is true once in n times.
func (f fuzzed) oneIn(n int) bool { return f.IntN(n) == 0 }

// anyText is readable more often than not, and acceptable now and then.
func (f fuzzed) anyText() argument {
	switch f.IntN(12) {
	case 0:
		return null
	case 1:
		return encode("text", "")
	case 2, 3:
		return encode("text", oneOf(f, kit.OddTexts))
	case 4, 5:
		return encode("text", f.unicode(600)) // mostly too long
	case 6, 7:
		return encode("text", f.unicode(40))
	case 8:
		return encode("text", strings.Repeat("é", 255+f.IntN(3))+strings.Repeat("x", f.IntN(3))) // about 512 bytes
	case 9:
		return encode("text", f.bytes(1+f.IntN(20)))
	case 10:
		return encode("text", f.unicode(20)+oneOf(f, []string{"\x00", "\xff", "\xc0\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80", "é"[:1]})+f.unicode(5))
	default:
		if f.oneIn(40) {
			return encode("text", strings.Repeat(f.unicode(10)+"x", 1+f.IntN(10_000)))
		}
		return encode("text", string(rune(f.IntN(utf8.MaxRune))))
	}
}

// unicode is up to so many characters from all planes, never a zero byte.
func (f fuzzed) unicode(most int) string {
	var b strings.Builder
	limits := []int{0x7f, 0x7ff, 0xffff, utf8.MaxRune}
	for range f.IntN(most + 1) {
		b.WriteRune(rune(1 + f.IntN(oneOf(f, limits)))) // a surrogate becomes U+FFFD
	}
	return b.String()
}

func (f fuzzed) bytes(n int) string {
	bytes := make([]byte, n)
	for i := range bytes {
		bytes[i] = byte(f.Uint32())
	}
	return string(bytes)
}

var extremeIntegers = []int64{
	0, 1, -1, 2, 10, 1_000_000, math.MaxInt32, math.MaxInt32 + 1, math.MinInt32, math.MinInt32 - 1,
	kit.MaxTokens - 1, kit.MaxTokens, kit.MaxTokens + 1, 9_223_372_036_854, 9_223_372_036_855, 1 << 53, -kit.MaxTokens,
	math.MaxInt64 - 1, math.MaxInt64, math.MinInt64, math.MinInt64 + 1,
}

func (f fuzzed) integer() int64 {
	switch f.IntN(3) {
	case 0:
		return oneOf(f, extremeIntegers)
	case 1:
		return int64(f.Uint64()) >> f.IntN(64)
	default:
		return int64(f.IntN(20)) - 5
	}
}

var noNumbers = []string{
	"", " ", "1.5", "1e3", "NaN", "Infinity", "one", "--1", "+-1", "1 2", "٣", "１", "1\x00", "\xff1", "null", "'1'", "0 or 1=1", strings.Repeat("9", 400),
}

var noInstants = []string{
	"", "soon", "2024-02-30", "2024-13-01", "25:00", "294278-01-01", "4714-01-01 BC", "2024-01-01 00:00:00+99", "1", "\x00", "\xff", "2024-01-01 nowhere",
}

// noValues are of each type what it refuses, with which SQLSTATEs, and the length of a binary value.
var noValues = map[string]struct {
	texts  []string
	codes  []string
	length int
}{
	"bigint":  {append(noNumbers, "9223372036854775808", "-9223372036854775809"), unreadable.number, 8},
	"integer": {append(noNumbers, "2147483648", "-2147483649"), unreadable.number, 4},
	"boolean": {[]string{"", "2", "maybe", "tr ue", "o", "\x00", "\xff"}, unreadable.boolean, 0},
	"interval": {[]string{
		"", "soon", "1 fortnight", "one day", "1 second 1 second", "999999999999 years", "-2147483649 days", "9223372036854775808 microseconds",
		"1e400 seconds", "NaN", "P", "00:00:00:00:00", "1\x00second", "\xff", strings.Repeat("1 day ", 50),
	}, unreadable.interval, 16},
	"timestamptz": {noInstants, slices.Concat(unreadable.instant, unreadable.number, []string{"22023"}), 8},
	"timestamp":   {noInstants, slices.Concat(unreadable.instant, unreadable.number, []string{"22023"}), 8},
}

// any draws an argument of a type, about an instant.
func (f fuzzed) any(of string, now time.Time) argument {
	if of == "text" {
		return f.anyText()
	}
	no := noValues[of]
	switch n := f.IntN(8); {
	case n == 0 || n == 3 && of == "boolean":
		return null
	case n == 1:
		return bad(oneOf(f, slices.Concat(no.texts, []string{"☃" + f.unicode(10)})), no.codes)
	case n == 2 && no.length > 0: // a binary value of the wrong size
		size := f.IntN(2 * no.length)
		if size >= no.length {
			size++
		}
		return argument{text: []byte("no value"), binary: []byte(f.bytes(size)), unreadable: slices.Concat(unreadable.binary, no.codes)}
	}
	switch of {
	case "bigint":
		return encode(of, f.integer())
	case "integer":
		return encode(of, int64(int32(f.integer())))
	case "boolean":
		return encode(of, f.oneIn(2))
	case "interval":
		return f.anySpan()
	}
	if f.oneIn(5) {
		return encode(of, oneOf(f, []kit.Instant{kit.Infinity, kit.NegativeInfinity}))
	}
	return encode(of, kit.Instant(now.UnixMicro()+oneOf(f, []int64{0, 1, -1, 1_000_000, -kit.Day, kit.Day, 365 * kit.Day})))
}

// The ends of what an interval can hold, which in PostgreSQL 17 and later are infinity and -infinity.
var (
	mostSpan  = kit.Span{Months: math.MaxInt32, Days: math.MaxInt32, Us: math.MaxInt64}
	leastSpan = kit.Span{Months: math.MinInt32, Days: math.MinInt32, Us: math.MinInt64}
)

// Intervals as people write them, and as nobody should.
var writtenSpans = map[string]kit.Span{
	"0":                  {},
	"1 second":           {Us: 1_000_000},
	"178000000 years":    {Months: 178_000_000 * 12},
	"-178000000 years":   {Months: -178_000_000 * 12},
	"1 year -12 months":  {},
	"1 month -30 days":   {Months: 1, Days: -30},
	"1 day -24 hours":    {Days: 1, Us: -kit.Day},
	"P1Y2M10DT2H30M":     {Months: 14, Days: 10, Us: 9_000_000_000},
	"-00:00:00.000001":   {Us: -1},
	"2147483647 days":    {Days: math.MaxInt32},
	"-2147483648 days":   {Days: math.MinInt32},
	"365250 days":        {Days: 365_250},
	"365250 days 1 usec": {Days: 365_250, Us: 1},
	"8766000:00:00":      {Us: kit.MaxSpan},
	"1 week ago":         {Days: -7},
	"@ 1 century":        {Months: 1200},
}

var writtenSpanNames = slices.Sorted(maps.Keys(writtenSpans))

func (f fuzzed) anySpan() argument {
	switch f.IntN(5) {
	case 0:
		return f.extreme()
	case 1, 2:
		text := oneOf(f, writtenSpanNames)
		a := encode("interval", writtenSpans[text])
		a.text = []byte(text)
		return a
	}
	s := kit.Span{Us: f.integer()}
	if f.oneIn(2) {
		s.Days = int32(f.integer())
	}
	if f.oneIn(2) {
		s.Months = int32(f.integer())
	}
	if s == mostSpan || s == leastSpan {
		return f.extreme()
	}
	return encode("interval", s)
}

// extreme has no text: what PostgreSQL 17 writes as infinity others cannot read.
func (f fuzzed) extreme() argument {
	a := encode("interval", oneOf(f, []kit.Span{mostSpan, leastSpan}))
	a.text = []byte("178000000 years")
	if a.value == leastSpan {
		a.text = []byte("-178000000 years")
	}
	return a
}

func (f fuzzed) noArray() argument {
	if f.oneIn(3) {
		return argument{text: []byte("no array"), binary: []byte(f.brokenArray()), unreadable: slices.Concat(unreadable.binary, unreadable.array)}
	}
	return bad(oneOf(f, []string{
		"", "{", "}", "a", "{{1},{2,3}}", "{1}{2}", "[1:3]={1}", "[3:1]={}", "{1,{2}}", `{"1}`, "[2147483647:2147483648]={1,2}", "[1:99999999999]={1}",
		"{{{{{{{1}}}}}}}", "{\x00}", "{\xff}", "☃" + f.unicode(10),
	}), unreadable.array)
}

// brokenArray begins like an array and does not go on like one.
func (f fuzzed) brokenArray() string {
	b := append32(nil, oneOf(f, []int64{-1, 1, 2, 7, math.MaxInt32, math.MinInt32}), int64(f.IntN(3)),
		oneOf(f, []int64{pgtype.TextOID, pgtype.Int8OID, pgtype.Int4OID, 0, 2249}), oneOf(f, []int64{-1, 1, 1 << 20, math.MaxInt32}),
		oneOf(f, []int64{0, 1, math.MaxInt32, math.MinInt32}))
	return string(b[:f.IntN(len(b))])
}

// shapeFor cuts n elements into one or two dimensions that begin anywhere.
func (f fuzzed) shapeFor(n int) []pgtype.ArrayDimension {
	shape := []pgtype.ArrayDimension{} // nil would be null
	lengths := []int{n}
	if rows := 2 + f.IntN(4); n == 0 {
		return shape
	} else if n%rows == 0 && f.oneIn(4) {
		lengths = []int{rows, n / rows}
	}
	for _, length := range lengths {
		shape = append(shape, pgtype.ArrayDimension{Length: int32(length), LowerBound: oneOf(f, []int32{1, 1, 1, 0, 2, -3, 1000, math.MinInt32})})
	}
	return shape
}
