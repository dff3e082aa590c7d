package kit

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// Every way of sending arguments: typed by the server, and written into the text.
var Protocols = []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeSimpleProtocol}

// Texts that have broken other people's quoting, matching or indexing.
var OddTexts = []string{
	"it's", `"quoted"`, "''", `\`, `\'; drop table ratelimit.buckets; --`, "$$", "$1", "%s %I %L %", "{{ . }}", "null", "NULL",
	" ", "  ", "a", "A", "á", "a\u0301", "ä", "ß", "ss", "İ", "ı", "a ", " a", "a\t", "a\n", "a\r\n", "line\nbreak", "\u00a0", "\u200b", "\ufeff",
	"🚦", "👩‍👩‍👧‍👧", "\U0010ffff", strings.Repeat("語", 170) + "ab", strings.Repeat("🚦", 128), strings.Repeat("x", 512), "\x01\x7f",
}

// InMode sends every query in one of pgx's modes.
type InMode struct {
	Conn *pgx.Conn
	Mode pgx.QueryExecMode
}

func (q InMode) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return q.Conn.QueryRow(ctx, sql, append([]any{q.Mode}, args...)...)
}

// ClockPerSession lets a test set the clock of one session, test.now in microseconds of the Unix epoch.
func (db *TestDB) ClockPerSession() {
	db.Execute(`
		create or replace function ratelimit.clock() returns timestamptz language sql volatile parallel safe
		as $$ select timestamptz 'epoch' + current_setting('test.now')::bigint * interval '1 microsecond' $$`)
}

// RawDecision makes a call without any function or operator of the session's own.
func RawDecision(conn *pgx.Conn, call string, args ...any) string {
	var d struct {
		allowed, Replayed      bool
		remaining, Capacity    int64
		retryAfter, resetAfter pgtype.Interval
	}
	err := conn.QueryRow(context.Background(), "select allowed, remaining, retry_after, reset_after, capacity, replayed from public."+call, args...).
		Scan(&d.allowed, &d.remaining, &d.retryAfter, &d.resetAfter, &d.Capacity, &d.Replayed)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%+v", d)
}
