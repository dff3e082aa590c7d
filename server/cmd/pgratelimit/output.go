package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/server/internal/inspect"
)

// print prints a value with --json, and otherwise text.
func (p *program) print(c *cobra.Command, value any, text string) error {
	if !p.json {
		_, err := fmt.Fprintln(c.OutOrStdout(), text)
		return err
	}
	return encode(c.OutOrStdout(), value, "")
}

// columns aligns what write writes, with a tab between two cells.
func columns(write func(table io.Writer)) string {
	var text strings.Builder
	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	write(table)
	table.Flush()
	return strings.TrimRight(text.String(), "\n")
}

func encode(w io.Writer, value any, indent string) error {
	out := json.NewEncoder(w)
	out.SetEscapeHTML(false)
	out.SetIndent("", indent)
	return out.Encode(value)
}

// described adds DETAIL and a remedy to an error of the database.
func described(err error) error {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return err
	}
	hint := pgErr.Hint
	function := nameOf.FindString(pgErr.Message)
	database, isOfDatabase := strings.CutPrefix(pgErr.Message, "permission denied for database ")
	switch {
	case pgErr.Code == "42883": // undefined_function
		hint = "Run pgratelimit install, or put the schema of the functions on search_path."
	case pgErr.Code == "42501" && isOfDatabase:
		hint = "Its owner can run: grant create on database " + pgx.Identifier{database}.Sanitize() + " to " + inspect.SomeRole + ";"
	case pgErr.Code == "42501" && function != "": // insufficient_privilege
		hint = "Its owner can run: " + inspect.Grant(inspect.SomeRole, function)
	}
	more := strings.Join(slices.DeleteFunc([]string{pgErr.Detail, hint}, func(s string) bool { return s == "" }), " ")
	if more == "" {
		return err
	}
	return fmt.Errorf("%w. %s", err, more)
}

var nameOf = regexp.MustCompile(`ratelimit_\w+`)

// The exit codes, which --help lists.
const (
	exitDone        = 0
	exitError       = 1
	exitNo          = 2
	exitUsage       = 64 // those of sysexits.h
	exitUnavailable = 69
)

// An answerNo ends a command with exit code 2. The command has printed its result.
type answerNo struct{}

func (answerNo) Error() string { return "the answer is no" }

type usageError struct{ error }

func exitCode(err error) int {
	var no answerNo
	var usage usageError
	var connect *pgconn.ConnectError
	switch {
	case err == nil:
		return exitDone
	case errors.As(err, &no):
		return exitNo
	case errors.As(err, &usage):
		return exitUsage
	case errors.As(err, &connect), errors.Is(err, context.DeadlineExceeded):
		return exitUnavailable
	}
	return exitError
}

// complain prints an error, with --json as an object.
func (p *program) complain(w io.Writer, err error) {
	text := strings.Join(slices.Compact(strings.Split(err.Error(), "\n")), "\n") // pgx tries an address with TLS and without, and says twice that nobody is there
	if !p.json {
		fmt.Fprintln(w, text)
		return
	}
	complaint := struct {
		Error    string `json:"error"`
		SQLState string `json:"sqlstate,omitempty"`
	}{Error: text}
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		complaint.SQLState = pgErr.Code
	}
	_ = encode(w, complaint, "") // there is nowhere to say that it failed
}
