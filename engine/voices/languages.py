"""Codes of languages: ISO 639-1 where a language has two letters, else ISO 639-3; and the type of its voices."""

import re

# Two letters, three letters, English name. Source: the ISO 639-3 code tables of SIL International, by pycountry 26.2.
_TABLE = """
aa aar Afar; ab abk Abkhazian; ae ave Avestan; af afr Afrikaans; ak aka Akan; am amh Amharic; an arg Aragonese;
ar ara Arabic; as asm Assamese; av ava Avaric; ay aym Aymara; az aze Azerbaijani; ba bak Bashkir; be bel Belarusian;
bg bul Bulgarian; bi bis Bislama; bm bam Bambara; bn ben Bengali; bo bod Tibetan; br bre Breton; bs bos Bosnian;
ca cat Catalan; ce che Chechen; ch cha Chamorro; co cos Corsican; cr cre Cree; cs ces Czech; cu chu Church Slavic;
cv chv Chuvash; cy cym Welsh; da dan Danish; de deu German; dv div Divehi; dz dzo Dzongkha; ee ewe Ewe; el ell Greek;
en eng English; eo epo Esperanto; es spa Spanish; et est Estonian; eu eus Basque; fa fas Persian; ff ful Fulah;
fi fin Finnish; fj fij Fijian; fo fao Faroese; fr fra French; fy fry Western Frisian; ga gle Irish;
gd gla Scottish Gaelic; gl glg Galician; gn grn Guarani; gu guj Gujarati; gv glv Manx; ha hau Hausa; he heb Hebrew;
hi hin Hindi; ho hmo Hiri Motu; hr hrv Croatian; ht hat Haitian Creole; hu hun Hungarian; hy hye Armenian;
hz her Herero; ia ina Interlingua; id ind Indonesian; ie ile Interlingue; ig ibo Igbo; ii iii Sichuan Yi;
ik ipk Inupiaq; io ido Ido; is isl Icelandic; it ita Italian; iu iku Inuktitut; ja jpn Japanese; jv jav Javanese;
ka kat Georgian; kg kon Kongo; ki kik Kikuyu; kj kua Kuanyama; kk kaz Kazakh; kl kal Kalaallisut; km khm Khmer;
kn kan Kannada; ko kor Korean; kr kau Kanuri; ks kas Kashmiri; ku kur Kurdish; kv kom Komi; kw cor Cornish;
ky kir Kirghiz; la lat Latin; lb ltz Luxembourgish; lg lug Ganda; li lim Limburgan; ln lin Lingala; lo lao Lao;
lt lit Lithuanian; lu lub Luba-Katanga; lv lav Latvian; mg mlg Malagasy; mh mah Marshallese; mi mri Maori;
mk mkd Macedonian; ml mal Malayalam; mn mon Mongolian; mr mar Marathi; ms msa Malay; mt mlt Maltese; my mya Burmese;
na nau Nauru; nb nob Norwegian Bokmål; nd nde North Ndebele; ne nep Nepali; ng ndo Ndonga; nl nld Dutch;
nn nno Norwegian Nynorsk; no nor Norwegian; nr nbl South Ndebele; nv nav Navajo; ny nya Chichewa; oc oci Occitan;
oj oji Ojibwa; om orm Oromo; or ori Oriya; os oss Ossetian; pa pan Panjabi; pi pli Pali; pl pol Polish;
ps pus Pushto; pt por Portuguese; qu que Quechua; rm roh Romansh; rn run Rundi; ro ron Romanian; ru rus Russian;
rw kin Kinyarwanda; sa san Sanskrit; sc srd Sardinian; sd snd Sindhi; se sme Northern Sami; sg sag Sango;
sh hbs Serbo-Croatian; si sin Sinhala; sk slk Slovak; sl slv Slovenian; sm smo Samoan; sn sna Shona; so som Somali;
sq sqi Albanian; sr srp Serbian; ss ssw Swati; st sot Southern Sotho; su sun Sundanese; sv swe Swedish;
sw swa Swahili; ta tam Tamil; te tel Telugu; tg tgk Tajik; th tha Thai; ti tir Tigrinya; tk tuk Turkmen;
tl tgl Tagalog; tn tsn Tswana; to ton Tonga; tr tur Turkish; ts tso Tsonga; tt tat Tatar; tw twi Twi;
ty tah Tahitian; ug uig Uighur; uk ukr Ukrainian; ur urd Urdu; uz uzb Uzbek; ve ven Venda; vi vie Vietnamese;
vo vol Volapük; wa wln Walloon; wo wol Wolof; xh xho Xhosa; yi yid Yiddish; yo yor Yoruba; za zha Zhuang;
zh zho Chinese; zu zul Zulu
"""
# Individual languages that go by the two letters of their macrolanguage. Source: SIL's table of macrolanguage mappings.
_MEMBERS = """
ar arb ary arz apc ajp acm afb aeb apd arq ars; az azj azb; et ekk; fa pes prs; ff fuf fuv fuc fue fuh fub fuq ffm;
gn gug; ku kmr; kr knc; lv lvs; mg plt; mn khk; ms zsm zlm; ne npi; om gaz hae orc gax; or ory; ps pbt pbu pst;
qu quy quz; sq als aln; sw swh swc; uz uzn uzs; yi ydd; zh cmn
"""

_ROWS = [row.split(maxsplit=2) for row in _TABLE.split(";")]
_NAMES = {two: name.strip() for two, _, name in _ROWS}
_TWO_LETTERS = {three: two for two, three, _ in _ROWS} | {
    member: row.split()[0] for row in _MEMBERS.split(";") for member in row.split()[1:]
}
_CODE = re.compile(r"([a-z]{2,3})(?:[-_].*)?", re.DOTALL)
# ISO 639-3 codes that name no language: several, none, unknown, uncoded.
_NO_LANGUAGE = ("mis", "mul", "und", "zxx")
ETHIOPIAN = ("am", "so", "ti", "om")


def language_code(text: object) -> str | None:
    """Return the code of `amh`, `am`, `am_ET` or `AM-Ethi`; None for what is no code of a language.

    That a code of three letters exists is not checked: there are 8000, and speech models for a thousand of them.
    """
    found = _CODE.fullmatch(text[:64].lower()) if isinstance(text, str) else None
    if found is None or found[1] in _NO_LANGUAGE:
        return None
    code = _TWO_LETTERS.get(found[1], found[1])
    return code if len(code) == 3 or code in _NAMES else None


def language_name(code: str) -> str:
    """Return the English name of a language; of those without a code of two letters, the code."""
    return _NAMES.get(code, code)


def voice_type(code: str) -> str:
    """Return the `type` of voices in this language."""
    if code in ETHIOPIAN:
        return "ethiopian"
    return "english_standard" if code == "en" else "standard"
